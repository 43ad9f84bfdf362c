"""Packed preference trainers on a plain config of TRL's: what is told, what trains as TRL's own, what is refused."""

import logging

import peft
import pytest
import tiny
import torch
import trl
from selection import exhaustive
from training import arguments, lora_config
from trl_trainers import (
    ALL_PACKED,
    PACKED,
    beyond,
    build,
    build_packed,
    classifier,
    differences,
    encoder_decoder,
    run,
)

import trl_packfa
from trl_packfa.config.requirements import Requirement
from trl_packfa.errors import InvalidConfig, UnsupportedModel
from trl_packfa.patching.state import find_state


def plain(kind, out, **options):
    own = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig, "kto": trl.KTOConfig}[kind]
    return build(kind, out, cls=getattr(trl_packfa, ALL_PACKED[kind] + "Trainer"), config=own, **options)


def told(caplog, what):
    return [record.message for record in caplog.records if what in record.message]


@pytest.mark.parametrize("kind", PACKED)
def test_an_adapter_that_nobody_asked_for_is_told(kind, tmp_path, caplog):
    trainer = plain(kind, tmp_path, reference=False, max_steps=1)
    assert isinstance(trainer.args, trainer._config) and hasattr(trainer.model, "peft_config")
    (line,) = told(caplog, "adds a LoRA adapter")
    assert f"with a plain {PACKED[kind].removeprefix('Packed')}Config, {PACKED[kind]}Trainer adds a LoRA" in line
    assert f"{PACKED[kind]}Config(use_peft=False) trains all parameters" in line
    caplog.clear()
    build_packed(kind, tmp_path, use_peft=True, reference=False)
    plain(kind, tmp_path, lora=True)
    assert not told(caplog, "adds a LoRA adapter")


def passed(how, model):
    """Return the trainer's arguments with an optimizer, or a part of one, of the model's own parameters."""
    groups = [{"params": (p for p in model.parameters() if p.dim() > 1)},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    if how in ("groups", "iterator"):
        params = groups if how == "groups" else model.named_parameters()
        return {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"params": params, "lr": 0.1})}
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    given = {"optimizer": (optimizer, None), "both": (optimizer, schedule), "schedule": (None, schedule)}
    return {"optimizers": given[how]}


def moved(make, kind, out, how="optimizer", **options):
    """Return the names of the parameters that two steps move, in a trainer with the user's own optimizer."""
    model = classifier() if kind == "reward" else tiny.model(layers=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make(kind, out, model=model, given=passed(how, model), max_steps=2, **options)
    trainer.train()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("kind, how", [
    *((kind, "optimizer") for kind in ALL_PACKED),
    ("sft", "groups"), ("sft", "iterator"),  # TRL's trainers of pairs take no class of an optimizer
    *exhaustive(("sft", "both"), ("sft", "schedule"), ("dpo", "both")),
])  # fmt: skip
@pytest.mark.parametrize("make", [plain, build_packed], ids=["plain", "packed"])
def test_an_optimizer_of_the_models_parameters_keeps_the_default_adapter_away(kind, make, how, tmp_path, caplog):
    own = {} if make is plain else {"use_peft": True}
    trained = moved(make, kind, tmp_path, how, **own)
    assert trained == moved(build, kind, tmp_path, how) and len(trained) > 10
    assert len(told(caplog, "no LoRA adapter is added: the optimizer that was passed holds")) == 1


@pytest.mark.parametrize("kind", ALL_PACKED)
def test_an_optimizer_of_which_nothing_trains_is_refused(kind, tmp_path):
    for make in (plain, build_packed):
        with pytest.raises(InvalidConfig, match="and none of them trains"):
            moved(make, kind, tmp_path, lora=True)
    foreign = torch.optim.SGD(tiny.model(layers=2).parameters(), lr=0.1)
    with pytest.raises(InvalidConfig, match="holds 29 parameters, and none of them trains"):
        build_packed(kind, tmp_path, use_peft=True, reference=False, given={"optimizers": (foreign, None)})


def test_negative_control_an_optimizer_of_the_adapter_trains(tmp_path):
    """So does one class without parameters: the Trainer fills them in."""
    model = peft.get_peft_model(tiny.model(layers=2), lora_config())
    adapter = [p for p in model.parameters() if p.requires_grad]
    build_packed("sft", tmp_path, model=model, given={"optimizers": (torch.optim.SGD(adapter, lr=0.1), None)})
    given = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
    assert hasattr(build_packed("sft", tmp_path, use_peft=True, given=given).model, "peft_config")


@pytest.mark.parametrize("kind", ALL_PACKED)
def test_a_config_is_used_twice_and_changed_between(kind, tmp_path):
    """A sweep in a notebook: the trainer writes nothing of its own into the config that it is passed."""
    model = classifier() if kind == "reward" else tiny.model(layers=1)
    model.save_pretrained(tmp_path / "model")
    args = arguments(getattr(trl_packfa, ALL_PACKED[kind] + "Config"), tmp_path)
    given = {"model": str(tmp_path / "model"), "config": lambda *_, **__: args, "reference": False}
    for dtype in ("float32", "bfloat16"):
        args.dtype = dtype
        trainer = build_packed(kind, tmp_path, **given)
        assert trainer.args is args and args.model_init_kwargs is None
        assert trainer.model.get_input_embeddings().weight.dtype is getattr(torch, dtype)


@pytest.mark.parametrize("kind", PACKED)
def test_what_cannot_be_packed_trains_as_trls_own_would(kind, tmp_path, caplog, monkeypatch):
    options = {"max_steps": 2, "max_length": 30}
    expected, _ = run(build, kind, tmp_path, **options)

    refused = Requirement(lambda run: run.packing, "this cannot be packed.", why="a reason")
    monkeypatch.setattr("trl_packfa.trainers.settling.SETUP", (refused,))
    caplog.clear()
    logs, trainer = run(plain, kind, tmp_path, **options)
    assert max(differences(expected, logs).values()) == 0.0 and "padding_saved" not in logs[0]
    assert not hasattr(trainer.model, "peft_config") and find_state(trainer.model) is None
    (line,) = told(caplog, "trl-packfa:")
    name = PACKED[kind].removeprefix("Packed")
    assert f"this cannot be packed (a reason). Training as {name}Trainer would: padded, without a default" in line
    trainer.save_model(str(tmp_path / "saved"))
    with pytest.raises(InvalidConfig, match="this cannot be packed"):
        build_packed(kind, tmp_path, **options)


def test_a_model_that_cannot_run_without_pads_is_given_back(tmp_path, caplog):
    """It is found out once TRL has put an adapter around it."""
    trainer = plain("reward", tmp_path, model=encoder_decoder())
    assert not trainer._packs and trainer._cutter is None and not hasattr(trainer.model, "peft_config")
    assert len(told(caplog, "Training as RewardTrainer would")) == 1
    with pytest.raises(UnsupportedModel, match="cannot run without its pads"):
        build_packed("reward", tmp_path, model=encoder_decoder())


@pytest.mark.parametrize("kind", PACKED)
def test_streams_train_without_pads_and_without_a_cut(kind, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = {"max_steps": 2, "max_length": 30, "stream": True}
    options |= {"loss_type": "apo_zero_unpaired"} if kind == "kto" else {}
    expected, _ = run(build, kind, tmp_path, **options)
    logs, trainer = run(build_packed, kind, tmp_path, **options)
    assert not beyond(expected, logs)
    assert all(entry["padding_saved"] > 0.05 for entry in logs)
    assert trainer.cut_reason == "the pairs of a stream are not known before they are read"
    assert len(told(caplog, "padded micro-batches stay as they are: the pairs of a stream")) == 1
    trainer.save_model(str(tmp_path / "saved"))


def test_float16_weights_are_refused_as_in_sft(tmp_path, caplog):
    with pytest.raises(InvalidConfig, match="trained weights are in float16"):
        build_packed("dpo", tmp_path, model=tiny.model(layers=1).half())
    trainer = plain("dpo", tmp_path, model=tiny.model(layers=1).half(), reference=False)
    assert hasattr(trainer.model, "peft_config") and not told(caplog, "Training as")  # PEFT keeps it in float32


def test_the_account_counts_pairs_and_rows(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    counted = dict(build_packed("dpo", tmp_path).packing_reports["train"].lines())
    assert (counted["pairs"], counted["rows"], counted["packed rows"]) == ("24", "48", "48")
    counted = dict(build_packed("kto", tmp_path).packing_reports["train"].lines())
    assert counted["examples"] == "24" and "pairs" not in counted
