"""Every recipe as it stands: read by the real parsers, trained for two steps on a small model of its kind."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import tiny
import torch
import vision
import yaml
from snippets import run_shortened
from tiny_models import small_model
from training import FORMATS, built_trainers, rows

from trl_packfa.bench.arguments import read_arguments
from trl_packfa.cli.main import main
from trl_packfa.scripts.parsing import make_parser
from trl_packfa.scripts.train import classes_of, kind_of

RECIPES = Path(__file__).parents[2] / "recipes"
YAMLS = sorted(RECIPES.glob("*.yaml"))
IMAGES = "trl-lib/llava-instruct-mix"
ON_IMAGES = [path for path in YAMLS if IMAGES in path.read_text()]
ON_TEXT = [path for path in YAMLS if path not in ON_IMAGES]
LAUNCHES = sorted((RECIPES / "launch").glob("*.yaml"))
SCRIPTS = sorted(path for path in RECIPES.glob("*.py") if path.name != "__init__.py")
# Weights that divide into NF4's blocks of 64.
NF4_SIZES = {"intermediate_size": 128}
# The model type of every Hub name in the recipes, and what its small model has otherwise.
TYPES = {
    "meta-llama/Llama-3.2-1B": ("llama", {}),
    "meta-llama/Llama-3.2-3B": ("llama", {}),
    "mistralai/Mistral-7B-v0.3": ("mistral", {"sliding_window": None}),
    "ibm-granite/granite-3.3-2b-base": ("granite", {}),
    "ibm-granite/granite-4.0-h-micro": ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "ibm-granite/granite-4.0-h-tiny": ("granitemoehybrid", {}),
    "microsoft/Phi-3-mini-4k-instruct": ("phi3", {}),
    "microsoft/phi-4": ("phi3", {"sliding_window": None}),
    "Qwen/Qwen3-8B": ("qwen3", {}),
    "Qwen/Qwen3-0.6B": ("qwen3", {}),
    "google/gemma-3-1b-it": ("gemma3_text", {}),
    "google/gemma-3-4b-it": ("gemma3", {}),
}
ROWS = {
    "trl-lib/tldr": rows(32),
    "trl-lib/Capybara": FORMATS["messages"],
    "trl-lib/ultrafeedback_binarized": [
        {"chosen": row["messages"], "rejected": [row["messages"][0], {"role": "assistant", "content": "9"}]}
        for row in FORMATS["messages"] * 2
    ],
}


def written(recipe):
    return yaml.safe_load(recipe.read_text())


def save_model(name, folder):
    """A small model of a Hub name's architecture, with a tokenizer, as `from_pretrained` finds them."""
    model_type, changes = TYPES[name]
    small_model(model_type, num_hidden_layers=2, **NF4_SIZES, **changes).save_pretrained(folder)
    (tiny.tokenizer() if model_type != "gemma3" else composite_processor()).save_pretrained(folder)
    return str(folder)


def composite_processor():
    """What `AutoProcessor` finds beside a composite model: a tokenizer and an image processor."""
    pytest.importorskip("PIL")
    from transformers import Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

    marks = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    plain = tiny.tokenizer(list(marks.values()))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_special_tokens": marks}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, **names)
    # TRL gives processors blocks of content instead of strings.
    template = plain.chat_template.replace("m['content']", "m['content'][0]['text']")
    return Gemma3Processor(Gemma3ImageProcessor(), tokenizer, image_seq_length=4, chat_template=template)


def save_data(name, folder):
    """A dataset folder that `load_dataset` reads as it would read the Hub's."""
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS[name])))
    return str(folder)


def adapted(model):
    return {name.split(".lora_B")[0] for name, p in model.named_parameters() if "lora_B" in name and p.abs().sum() > 0}


def save_images(model_folder, data_folder):
    """Save a small LLaVA with its processor, and conversations about images."""
    for part in vision.family("llava"):
        part.save_pretrained(model_folder)
    data_folder.mkdir()
    vision.messages(16).to_parquet(data_folder / "train.parquet")


def two_steps(recipe, model, data, out):
    argv = f"train --config {recipe} --model_name_or_path {model} --dataset_name {data} --output_dir {out}"
    return f"{argv} --max_steps 2 --use_cpu true --report_to none --disable_tqdm true --logging_steps 1".split()


@pytest.mark.parametrize("recipe", ON_IMAGES, ids=lambda path: path.stem)
def test_every_recipe_on_images_trains_two_steps(recipe, tmp_path):
    """On a small LLaVA: the processors of these models need packages that are not here."""
    save_images(tmp_path / "model", tmp_path / "data")
    out = tmp_path / "out"
    assert main(two_steps(recipe, tmp_path / "model", tmp_path / "data", out)) == 0
    logs = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert len([entry for entry in logs if entry.get("padding_saved", 0) > 0]) == 2
    assert "adapter_model.safetensors" in os.listdir(out)


@pytest.mark.parametrize("recipe", ON_TEXT, ids=lambda path: path.stem)
def test_every_recipe_trains_two_steps(recipe, tmp_path, monkeypatch):
    config = written(recipe)
    quantized = config.get("load_in_4bit")
    if quantized:
        pytest.importorskip("bitsandbytes")
    trainers = built_trainers(monkeypatch)
    model = save_model(config["model_name_or_path"], tmp_path / "model")
    data = save_data(config["dataset_name"], tmp_path / "data")
    out = str(tmp_path / "out")
    # TRL knows the templates of the real tokenizers; the small one's has its own markers.
    more = "--bf16 false --per_device_train_batch_size 4 --gradient_accumulation_steps 2".split()
    assert main([*two_steps(recipe, model, data, out), *more]) == 0
    (trainer,) = trainers
    of_pairs = "trainer" in config
    assert trainer.trl_packfa_padding_free.first_calls if of_pairs else trainer.check_report.is_exact
    assert bool(getattr(trainer.model, "is_loaded_in_4bit", False)) == bool(quantized)
    saved = os.listdir(out)
    report = set() if of_pairs else {"check_report.json"}
    assert {"packing_report.json", "README.md", *report} <= set(saved)
    if config.get("use_peft") is False:
        assert all(p.requires_grad for p in trainer.model.parameters()) and "model.safetensors" in saved
    else:
        assert "adapter_model.safetensors" in saved
        names = {name.split(".")[-1] for name in adapted(trainer.model)}
        assert names and "out_proj" not in names and "lm_head" not in names
        assert not any("lora" in name and "vision" in name for name, _ in trainer.model.named_parameters())


@pytest.mark.parametrize("recipe", YAMLS, ids=lambda path: path.stem)
def test_every_recipe_says_what_it_is_and_how_to_run_it(recipe):
    text = recipe.read_text()
    assert f"trl-packfa train --config recipes/{recipe.name}" in text
    assert re.search(rf"-m trl_packfa train --config recipes/{recipe.name}", text)
    for launch in re.findall(r"recipes/launch/\S+", text):
        assert (RECIPES.parent / launch).exists()
    assert not set(written(recipe)) - known_arguments(written(recipe).get("trainer", "sft")), "a misspelled key"


def known_arguments(trainer):
    parser = make_parser(classes_of(kind_of(["--trainer", trainer])), prog="trl-packfa train")
    return {action.dest for action in parser._actions}


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_launch_files_go_through_accelerates_own_parser(path, tmp_path, monkeypatch):
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    recipe = RECIPES / "lora_llama3.yaml"
    argv = ["--config_file", str(path), "-m", "trl_packfa", "train", "--config", str(recipe)]
    args = launch.launch_command_parser().parse_args(argv)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(launch, "is_bf16_available", lambda *_: True, raising=False)
    parsed, _, _ = launch._validate_launch_command(args)
    assert parsed.num_processes == config.num_processes == 8 * parsed.num_machines
    assert parsed.training_script == "trl_packfa" and parsed.module
    assert parsed.mixed_precision == "bf16"
    kind = path.stem.split("_")[0]
    assert parsed.use_fsdp == (kind == "fsdp2") and parsed.use_deepspeed == kind.startswith("zero")
    assert parsed.multi_gpu == (kind == "ddp")
    if kind == "fsdp2":
        assert str(parsed.fsdp_version) == "2"
    if kind.startswith("zero"):
        assert str(parsed.zero_stage) == kind[-1]
    wrong = tmp_path / "wrong.yaml"  # the control
    wrong.write_text(path.read_text() + "num_procs: 8\n")
    with pytest.raises(ValueError, match="num_procs"):
        load_config_from_file(str(wrong))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_runs(script, tmp_path, monkeypatch, capsys):
    """As written, but for the Hub names and the time that it takes."""
    if "load_in_4bit" in script.read_text():
        pytest.importorskip("bitsandbytes")
    if "sentence_transformers" in script.read_text():
        pytest.importorskip("sentence_transformers")
    run_shortened(script.read_text(), tmp_path, monkeypatch)
    told = capsys.readouterr().out
    assert "exact: isolation 0.0e+00" in told or "padded batches: computed without padding, exact" in told
    assert [path for path in tmp_path.glob("*-packed/*.safetensors")]


@pytest.mark.parametrize("source", [None, "data"], ids=["its own problems", "a dataset"])
def test_the_notebook_runs_from_its_first_cell_to_its_last(source, tmp_path, monkeypatch, capsys):
    """As written, but for the cell of names and sizes."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows(40)))
    save_images(tmp_path / "image_model", tmp_path / "images")
    small = {"IMAGE_MODEL": source and "image_model", "IMAGE_DATASET": "images",
             "MODEL": "model", "DATASET": source, "EXAMPLES": 16 if source else 40, "HELD_OUT": 4, "STEPS": 2,
             "OPTIONS": {"use_cpu": True, "per_device_train_batch_size": 2, "disable_tqdm": True}}  # fmt: skip
    text = (RECIPES / "packed_finetune.ipynb").read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert "exact: isolation 0.0e+00" in shown and "[[" in shown, "saved with its outputs"
    assert len(text) < 60_000 and not re.search(r"/(home|root|tmp|usr|work)/|stderr", shown), "no machine's paths"
    names = {}
    for cell in cells:
        code = "".join(line for line in cell["source"] if not line.startswith("%"))
        before = set(names)
        exec(code, names)  # fresh names, as a notebook's kernel has
        if "parameters" in cell["metadata"].get("tags", []):
            assert set(names) - before - {"__builtins__"} == set(small)
            names.update(small)
    told = capsys.readouterr().out
    assert "exact: isolation 0.0e+00" in told and "[[" in told and ("image_tokens" in told) == bool(source)
    saved = {path.name for path in Path("packed-notebook").iterdir()}
    assert {"adapter_model.safetensors", "check_report.json"} <= saved


def test_the_table_on_real_weights_takes_names_or_paths(tmp_path):
    """`table2.sh` hands its arguments over; the settings go through the real parser."""
    (tmp_path / "trl-packfa").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "trl-packfa").chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = ["bash", str(RECIPES / "table2.sh"), "FOLDER", "DATA.jsonl", "--documents", "32"]
    told = subprocess.run(argv, env=path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0] == "bench" and told[3:] == ["--model", "FOLDER", "--dataset", "DATA.jsonl", "--documents", "32"]
    setup = read_arguments(told[1:])
    assert [side.name for side in setup.sides] == ["padding", "trl-bfd", "bfd", "step"]
    assert setup.bench.documents == 32 and setup.args.num_train_epochs == 1 and setup.args.max_steps == -1
