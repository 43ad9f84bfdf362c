import json
import logging
import os
import re
import subprocess
import sys

import pytest
import tiny
import torch
from datasets import load_from_disk
from peft import AutoPeftModelForCausalLM
from tiny_models.encoders import small_encoder
from tolerance import BFLOAT16_ADAPTERS, assert_trajectory
from training import arguments, dataset, packed_trainer, trained
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging
from trl import get_quantization_config

import trl_packfa
from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.adapters import table
from trl_packfa.cli import OWN_PARSERS
from trl_packfa.cli.main import main
from trl_packfa.errors import ContaminationError, InvalidConfig
from trl_packfa.patches import measured
from trl_packfa.terminal.progress import errors_only


@pytest.fixture
def saved_model(tmp_path):
    return tiny.save(tmp_path / "model")


HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "numpy", "rich"}


@pytest.mark.parametrize(
    "argv", [["--help"], ["check", "--help"], ["recipes", "--help"], ["--version"], ["recipes", "--json"]]
)
def test_help_imports_nothing_heavy(argv):
    code = f"import sys; from trl_packfa.cli.main import main\ntry: main({argv})\nexcept SystemExit: pass\n"
    code += f"assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_env_says_what_a_bug_report_needs(capsys):
    main(["env", "--json"])
    facts = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert facts["torch"].startswith(torch.__version__.split("+")[0])
    wanted = "python platform processor cpus threads gpus cuda commit trl-packfa trl peft bitsandbytes"
    assert set(wanted.split()) <= facts.keys()
    assert facts["backend sdpa"].startswith("yes (") and not facts["backend varlen"].startswith("yes")
    assert "head_dim=128" in facts["attention asked for"]
    assert "transformers " in facts["model types measured with"] and "peft " in facts["adapters measured with"]


def test_tables_say_with_which_versions_they_were_measured(monkeypatch, capsys):
    main(["models"])
    with_these = measured.measured_with()
    said = f"measured with torch {with_these['torch']}, transformers {with_these['transformers']}"
    assert said in capsys.readouterr().out
    one_of_each = {name: versions.split(", ")[-1] for name, versions in with_these.items()}
    monkeypatch.setattr("trl_packfa.cli.models.installed_version", one_of_each.get)
    main(["models"])
    assert "here:" not in capsys.readouterr().out, "one of the versions"
    monkeypatch.setattr("trl_packfa.cli.models.installed_version", {**table.measured_with(), "peft": "0.0"}.get)
    main(["models", "--adapters"])
    assert "; here: peft 0.0; where the code differs, your model is checked" in capsys.readouterr().out


def test_recipes_are_listed_with_a_whole_sentence_each(capsys):
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["what"].endswith(".") for row in rows) and "README.md" not in {row["recipe"] for row in rows}
    said = {row["recipe"]: row["what"] for row in rows}
    assert said["bench/qlora_8b.yaml"].endswith("packed with FlashAttention, and ours."), "over two lines"


@pytest.mark.parametrize(("word", "meant"), [("trian", "train"), ("chek", "check"), ("recipies", "recipes")])
def test_a_mistyped_command_is_answered_with_the_nearest(word, meant, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([word])
    assert stopped.value.code == 2
    assert f"there is no command '{word}'. Did you mean {meant}?" in capsys.readouterr().err


def test_recipes_are_copied_and_never_overwritten(tmp_path, capsys):
    assert main(["recipes", "cp", "qlora_llama3", str(tmp_path / "new")]) == 0
    copy = tmp_path / "new" / "qlora_llama3.yaml"
    assert f"trl-packfa train --config {copy}" in capsys.readouterr().out
    original = copy.read_text()
    copy.write_text("mine")
    assert main(["recipes", "cp", "qlora_llama3.yaml", str(tmp_path / "new")]) == 1
    assert "already exists" in capsys.readouterr().err and copy.read_text() == "mine"
    assert original.startswith("# QLoRA of Llama 3.x")
    assert main(["recipes", "cp", "launch/ddp_8gpu.yaml", str(tmp_path)]) == 0
    assert "accelerate launch --config_file" in capsys.readouterr().out
    assert main(["recipes", "cp", "qlora_gpt9", str(tmp_path)]) == 1
    assert "there is no recipe 'qlora_gpt9'" in capsys.readouterr().err


def test_exit_codes_mean_something(monkeypatch, saved_model, capsys):
    def raises(error):
        def run(*_):
            raise error

        return run

    for error, code in ((InvalidConfig("no"), 1), (ContaminationError("leak"), 3), (KeyboardInterrupt(), 130)):
        monkeypatch.setitem(OWN_PARSERS, "train", raises(error))
        assert main(["train"]) == code
        assert "Traceback" not in capsys.readouterr().err
        for argv in (["--debug", "train"], ["train", "--debug"]):
            with pytest.raises(type(error)):
                main(argv)
    report = trl_packfa.check(trl_packfa.patch(tiny.model(layers=2)))
    leak = report.with_rows([report["isolation"]._replace(difference=1.0, where="model.layers.0")])
    monkeypatch.setattr("trl_packfa.checking.check", lambda *_, **__: leak)
    assert main(["check", saved_model]) == 3
    said = capsys.readouterr().out
    assert "leak: isolation 1.0e+00" in said and "first in module" in said
    assert "Train padded with packing=False" in said and "'reference'" not in said


def test_the_trainers_own_debug_flag_is_left_to_it(monkeypatch):
    seen = []
    monkeypatch.setitem(OWN_PARSERS, "train", lambda argv: seen.append(argv) or 0)
    assert main(["train", "--debug", "underflow_overflow", "--max_steps", "1"]) == 0
    assert main(["train", "--debug", "--max_steps", "1"]) == 0
    assert seen == [["--debug", "underflow_overflow", "--max_steps", "1"], ["--max_steps", "1"]]


def test_check_prints_the_verdict(saved_model, capsys):
    assert main(["check", saved_model]) == 0
    assert "exact: isolation 0.0e+00" in capsys.readouterr().out
    assert main(["check", saved_model, "--backend", "reference", "--dtype", "bfloat16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["backend"], report["dtype"]) == ("exact", "reference", "bfloat16")


def test_train_help_knows_our_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for name in ("--packing_strategy", "--overflow", "--attention_backend", "--load_in_4bit", "--learning_rate"):
        assert name in text


@pytest.mark.slow
def test_demo_runs_its_whole_story(tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    out, small = tmp_path / "out", "--base_steps 12 --steps 6 --batch_size 8 --max_length 256"
    assert main(["demo", "--output_dir", str(out), *small.split()]) == 0
    text = capsys.readouterr().out
    for part in ("random weights", "check: exact", "eval loss", "true tokens/s"):
        assert part in text
    summed_up = re.search(r"eval loss: ([\d.]+) at step 0, ([\d.]+) at step 6", text)
    before, after = map(float, summed_up.groups())
    assert after < before
    rates = [re.search(rf"│ {side} +│ +([\d,]+) ", text)[1] for side in ("padding", "step")]
    assert all(float(rate.replace(",", "")) > 0 for rate in rates)
    # The saved adapter, on a fresh base, has the loss of the training's end.
    args = PackedSFTConfig(str(tmp_path), use_cpu=True, bf16=False, load_in_4bit=True, max_length=256)
    loaded = AutoPeftModelForCausalLM.from_pretrained(
        out / "adapter", quantization_config=get_quantization_config(args), dtype="float32", is_trainable=True
    )
    tokenizer, data = AutoTokenizer.from_pretrained(out / "base"), load_from_disk(str(out / "data"))
    datasets = {"train_dataset": data["train"].select(range(64)), "eval_dataset": data["test"]}
    loss = PackedSFTTrainer(loaded, args, **datasets, processing_class=tokenizer).evaluate()["eval_loss"]
    assert_trajectory([loss], [after], places=BFLOAT16_ADAPTERS)


@pytest.mark.slow
def test_demo_takes_a_model_and_a_dataset(tmp_path):
    pytest.importorskip("bitsandbytes")
    data_file = str(tmp_path / "data.jsonl")
    dataset(24).to_json(data_file)
    model = tiny.save(tmp_path / "base", tiny.model(layers=2, intermediate_size=128, attention_bias=False))
    out = str(tmp_path / "out")
    assert main(["demo", "--model", model, "--dataset", data_file, "--output_dir", out, "--steps", "2"]) == 0
    assert "adapter_model.safetensors" in os.listdir(os.path.join(out, "adapter"))


def test_quiet_puts_every_level_back():
    own = logging.getLogger("trl_packfa")

    def found():
        return own.level, transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()

    before = found()
    with pytest.raises(ZeroDivisionError), errors_only():
        assert found() == (logging.ERROR, logging.ERROR, False)
        raise ZeroDivisionError
    assert found() == before


def test_metrics_of_a_run_are_numbers_ours_included(tmp_path):
    """For integrations (TensorBoard, trackio, W&B)."""
    trainer = trained(packed_trainer(arguments(out=tmp_path, gradient_accumulation_steps=2, loss_by="source")))
    logs = trainer.state.log_history
    ours = {"tokens_per_second", "documents", "longest_document", "micro_batches", "imbalance", "mfu", "loss/0"}
    assert len(logs) == 4 and all(ours <= entry.keys() for entry in logs if "loss" in entry)
    assert all(isinstance(value, (int, float)) for entry in logs for value in entry.values())


def test_a_reader_that_has_had_enough_is_no_error():
    """As in `trl-packfa models | head -1`."""
    command = [sys.executable, "-m", "trl_packfa", "recipes", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0


def test_backends_are_asked_about_the_model_that_is_described(capsys):
    """What serves a Llama need not serve a model with a softcap and wide heads."""
    words = "env --json --softcap 50 --head_dim 512 --value_dim 128 --sliding_window 9 --sinks --dtype float64"
    assert main(words.split()) == 0
    here = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert here["backend sdpa"].startswith("yes (")
    for reason in ("varlen_attn has no softcap", "up to 256, got 512", "no attention sinks", "got float64"):
        assert reason in here["backend varlen"]


@pytest.mark.parametrize("head", ["Embeddings", "SequenceClassification"])
def test_check_of_an_encoder_compares_padded_batches(head, tmp_path, capsys):
    small_encoder("bert", head).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "exact: without pads against padded" in printed and "pads left visible: not 0" in printed
    assert main(["check", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "exact"
