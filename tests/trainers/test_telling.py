"""A run from Python tells the learning rate, what packing saves, the verdict and the speed."""

import json
import re

import pytest
import rich
import tiny
import torch
from datasets import Dataset
from training import arguments, dataset, lora_config, packed_trainer, trained
from trl import DPOConfig, DPOTrainer, SFTConfig
from trl_trainers import pairs

from trl_packfa import (
    PackedDPOConfig,
    PackedKTOConfig,
    PackedRewardConfig,
    PackedSFTConfig,
    padding_free,
)
from trl_packfa.terminal.progress import RichProgressCallback

# TRL's default for all parameters, and ours for LoRA.
RATES = {PackedSFTConfig: (2e-5, 2e-4), PackedDPOConfig: (1e-6, 1e-5), PackedKTOConfig: (1e-6, 1e-5),
         PackedRewardConfig: (1e-4, 1e-4)}  # fmt: skip


def said(capsys):
    return [line.split("trl-packfa: ", 1)[1] for line in re.split(r"[\r\n]", capsys.readouterr().err)
            if "trl-packfa: " in line]  # fmt: skip


def quiet_arguments(tmp_path, cls=PackedSFTConfig, **options):
    return arguments(cls, tmp_path / "out", disable_tqdm=False, **options)


@pytest.mark.parametrize("config", RATES, ids=lambda config: config.__name__)
def test_an_adapter_has_its_own_default_rate(config):
    full, lora = RATES[config]
    make = lambda **options: config("out", use_cpu=True, bf16=False, **options).learning_rate  # noqa: E731
    assert (make(), make(use_peft=False), make(learning_rate=3e-5)) == (lora, full, 3e-5)
    assert make(learning_rate=full) == full


def without_rate(tmp_path, cls=PackedSFTConfig, **options):
    return cls(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, **options)


def test_a_rate_that_nobody_named_is_told(tmp_path, capsys):
    def told():
        return [line for line in said(capsys) if "rate" in line]

    assert packed_trainer(without_rate(tmp_path)).args.learning_rate == 2e-4
    assert told() == ["learning_rate=0.0002 for the adapter; TRL's default, 2e-05, is for all parameters"]
    packed_trainer(without_rate(tmp_path, learning_rate=2e-4))
    assert not told()
    plain = packed_trainer(without_rate(tmp_path, SFTConfig), peft_config=None)
    assert plain.args.learning_rate == 2e-5
    assert told() == ["learning_rate=2e-05 is TRL's default for all parameters; an adapter usually needs 0.0002"]


def test_a_run_that_turns_out_to_have_no_adapter_trains_with_trls_rate(tmp_path):
    late = without_rate(tmp_path)
    late.use_peft = False
    assert packed_trainer(late, peft_config=None).args.learning_rate == 2e-5
    named = without_rate(tmp_path, learning_rate=2e-4)
    named.use_peft = False
    assert packed_trainer(named, peft_config=None).args.learning_rate == 2e-4
    # The user's optimizer holds the model's parameters, so that no adapter is added.
    model = tiny.model(layers=2)
    optimizers = (torch.optim.SGD(model.parameters()), None)
    own = packed_trainer(without_rate(tmp_path), model=model, peft_config=None, optimizers=optimizers)
    assert own.args.learning_rate == 2e-5


def test_a_run_tells_the_verdict_the_data_and_the_speed(tmp_path, capsys):
    trained(packed_trainer(quiet_arguments(tmp_path)))
    verdict, data, speed = (line for line in said(capsys) if not line.startswith("checking"))
    assert verdict.startswith("check: exact, in ") and "in a row without boundaries by" in verdict
    assert re.fullmatch(r"48 documents of [\d,]+ tokens; 12 steps an epoch; \d\d% of a padded run's places are "
                        r"padding; here none is", data)  # fmt: skip
    assert re.fullmatch(r"[\d,]+ tokens trained in \d+ s, [\d,]+ tokens/s; a padded run computes [\d,]+ places, "
                        r"1\.\d\d times as many", speed)  # fmt: skip


def test_lost_tokens_and_filled_rows_are_part_of_the_line(tmp_path, capsys):
    args = quiet_arguments(tmp_path, packing_strategy="bfd", max_length=32, check_packing=False)
    trained(packed_trainer(args))
    data = next(line for line in said(capsys) if " documents of " in line)
    assert re.search(r"tokens, \d+\.\d% of all tokens cut or dropped; \d+ steps an epoch; rows are \d+% full", data)


def test_nothing_is_said_without_bars_nor_twice_by_a_command(tmp_path, capsys):
    trained(packed_trainer(arguments(out=tmp_path)))
    assert said(capsys) == []
    trainer = packed_trainer(quiet_arguments(tmp_path, check_packing=False))
    RichProgressCallback.attach(trainer, "training", rich.console.Console(quiet=True))
    trained(trainer)
    assert [line.split(" ", 2)[1] for line in said(capsys)] == ["tokens"]


def test_a_notebook_gets_tables(tmp_path, capsys, monkeypatch):
    console = rich.console.Console(width=100)
    shown = []
    monkeypatch.setattr(console, "is_jupyter", True)
    monkeypatch.setattr(console, "print", shown.append)
    monkeypatch.setattr("rich.get_console", lambda: console)
    trained(packed_trainer(quiet_arguments(tmp_path, check_packing=False)))
    assert [table.title for table in shown] == ["what packing does to the data", "what packing makes of it"]
    assert not [line for line in said(capsys) if " documents of " in line]


def test_a_trainer_without_padding_tells_its_speed(tmp_path, capsys):
    args = quiet_arguments(tmp_path, DPOConfig, max_length=None)
    options = {"processing_class": tiny.tokenizer(), "peft_config": lora_config()}
    trainer = DPOTrainer(tiny.model(), args=args, train_dataset=Dataset.from_list(pairs()), **options)
    trained(padding_free(trainer))
    speed = said(capsys)[-1]
    assert re.match(r"[\d,]+ tokens trained in \d+ s, [\d,]+ tokens/s; a padded run computes [\d,]+ places, ", speed)
    assert "without padding checked on model before the first step" in speed


def test_reports_are_saved_beside_the_model(tmp_path):
    trainer = trained(packed_trainer(arguments(out=tmp_path / "out")))
    trainer.save_model()
    trainer.save_model(str(tmp_path / "other"))
    for folder in ("out", "other"):
        assert json.loads((tmp_path / folder / "check_report.json").read_text())["verdict"] == "exact"
        assert json.loads((tmp_path / folder / "packing_report.json").read_text())["train"]["documents"] == 48
    padded = packed_trainer(arguments(out=tmp_path / "padded", packing=False), train_dataset=dataset())
    padded.save_model()
    assert not list((tmp_path / "padded").glob("*_report.json"))
