import json
import os
import subprocess
import sys
import time

import pytest
import tiny
import torch

from trl_packfa.cli import main


@pytest.fixture
def saved_model(tmp_path):
    path = str(tmp_path / "model")
    tiny.model(layers=2).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = ({"prompt": tiny.words(n, seed=n) + " ", "completion": tiny.words(n, seed=n + 99)} for n in range(1, 25))
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_help_is_instant_and_imports_no_torch():
    code = "import sys; from trl_packfa.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.perf_counter() - start < 1.0  # the whole process; 0.05 s on an idle machine


def test_models_and_backends_and_env_are_json(capsys):
    for command in ("models", "backends", "env"):
        assert main([command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
        assert main([command]) == 0
        assert capsys.readouterr().out


def test_check_prints_the_verdict(saved_model, capsys):
    assert main(["check", saved_model]) == 0
    assert "exact: isolation 0.0e+00" in capsys.readouterr().out
    assert main(["check", saved_model, "--backend", "reference", "--dtype", "bfloat16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["backend"], report["dtype"]) == ("exact", "reference", "bfloat16")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "/nowhere"], "UnsupportedModel: cannot load the model '/nowhere'"),
        (["check", "MODEL", "--backend", "fa2"], "NoBackend: there is no attention backend 'fa2'"),
        (["train", "--output_dir", "OUT", "--dataset_name", "x"], "InvalidConfig: no model"),
        (["train", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["train", "--output_dir", "OUT", "--learning_speed", "1"], "learning_speed"),
        (["train", "--model_name_or_path", "MODEL", "--output_dir", "OUT"], "InvalidConfig: no dataset"),
        (
            ["train", "--model_name_or_path", "MODEL", "--output_dir", "OUT", "--dataset_name", "OUT.zip"],
            "cannot tell the format of",
        ),
        (
            ["train", "--model_name_or_path", "MODEL", "--output_dir", "OUT", "--dataset_name", "DATA",
             "--eval_strategy", "epoch"],
            r"the dataset has no split ['test'], only ['train']",
        ),
    ],
)  # fmt: skip
def test_user_errors_are_one_message_without_traceback(saved_model, data_file, tmp_path, capsys, argv, message):
    (tmp_path / "out.zip").write_text("")
    names = {
        "MODEL": saved_model,
        "OUT": str(tmp_path / "out"),
        "DATA": data_file,
        "OUT.zip": str(tmp_path / "out.zip"),
    }
    on_cpu = ["--use_cpu", "true", "--bf16", "false"] if argv[0] == "train" else []
    assert main([names.get(word, word) for word in argv] + on_cpu) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_train_from_yaml_with_overrides(saved_model, data_file, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model_name_or_path: {saved_model}\ndataset_name: {data_file}\noutput_dir: {tmp_path / 'out'}\n"
        "packing_strategy: bfd\nmax_length: 64\nper_device_train_batch_size: 1\nuse_cpu: true\nbf16: false\n"
        "report_to: none\nsave_strategy: 'no'\n"
    )
    assert main(["train", "--config", str(config), "--max_steps", "2", "--logging_steps", "1"]) == 0
    saved = os.listdir(tmp_path / "out")
    assert {"adapter_model.safetensors", "packing_report.json", "exactness_report.json"} <= set(saved)


def test_train_help_knows_our_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for name in ("--packing_strategy", "--overflow", "--attention_backend", "--load_in_4bit", "--learning_rate"):
        assert name in text


@pytest.mark.slow
def test_demo_runs_its_whole_story(tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    from trl_packfa.demo import DemoOptions, run_demo

    torch.set_num_threads(2)
    figures = run_demo(DemoOptions(output_dir=tmp_path, base_steps=12, steps=6, batch_size=8, max_length=256))
    torch.set_num_threads(1)
    text = capsys.readouterr().out
    for part in ("random weights", "exact: isolation 0.0e+00", "held-out loss", "loaded back", "true tokens/s"):
        assert part in text.replace("\n", " ")
    assert figures["loss_loaded"] == pytest.approx(figures["loss_after"], abs=1e-3)
    assert figures["packed_tokens_per_second"] > 0 and figures["padded_tokens_per_second"] > 0


@pytest.mark.slow
def test_demo_takes_a_model_and_a_dataset(tmp_path, data_file):
    pytest.importorskip("bitsandbytes")
    model = tmp_path / "base"
    tiny.model(layers=2, intermediate_size=128, attention_bias=False).save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    out = str(tmp_path / "out")
    assert main(["demo", "--model", str(model), "--dataset", data_file, "--output-dir", out, "--steps", "2"]) == 0
    assert "adapter_model.safetensors" in os.listdir(os.path.join(out, "adapter"))
