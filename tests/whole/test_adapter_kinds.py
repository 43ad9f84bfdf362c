"""Every tuner of PEFT and its variants: measured as the table says, refused by name where packing is wrong, checked on
the user's model where nobody has measured it."""

import dataclasses
import importlib.util

import peft
import pytest
import tiny
import torch
from adapter_kinds import KINDS, NEEDS, REASONS, base_model
from adapter_matrix import measure, measure_kind
from calls import watched
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, VeloraConfig, get_peft_model, inject_adapter_in_model
from tolerance import FLOAT64, VISIBLE, assert_rounding
from training import arguments, packed_trainer

from trl_packfa import candidates, patch, unpatch
from trl_packfa.adapters import refuse_adapter, table
from trl_packfa.errors import ContaminationError, UnsupportedModel
from trl_packfa.patching.state import find_state

PLAIN = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def velora(**fields):
    return LoraConfig(velora_config=VeloraConfig(num_groups=4, **fields), **PLAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_measures_as_the_table_says(kind):
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"needs {NEEDS[kind]}")
    row = measure_kind(kind)
    assert row["verdict"] == table.results()[kind]["verdict"]
    if row["verdict"] == "refused":  # the control: this comparison sees what is wrong, or it does not even run
        worst = max(row.get("logits", 0), row.get("gradients", 0))
        assert "raises" in row or worst > VISIBLE


def test_every_tuner_of_the_installed_peft_is_in_the_table():
    assert {kind.split()[0] for kind in table.results()} == set(table.tuners())
    assert table.results().keys() == KINDS.keys() and REASONS.keys() <= KINDS.keys()
    assert len(table.tuners()) == 46
    committed = table.read_committed(table.RESULTS)["sources"]
    changed = [tuner for tuner in table.tuners() if committed[tuner] != table.source_of(tuner)]
    assert not changed, "run python tools/adapter_matrix.py"


def test_every_field_that_a_variant_of_lora_has_is_known():
    """PEFT's own list of variants, so that a new one is noticed."""
    layer = get_peft_model(base_model(), LoraConfig(target_modules=["q_proj"])).model.model.layers[0].self_attn.q_proj
    named = {field for fields in layer.lora_variants for field in fields} - {"mica"}
    assert {f"lora {field}" for field in named} <= table.results().keys()
    assert "lora init_lora_weights=mica" in table.results()


@pytest.mark.parametrize(("config", "kind"), [
    (velora(), "lora velora_config"),
    (velora(init_type="batch_average_once"), "lora velora_config.init_type=batch_average_once"),
    (PrefixTuningConfig(num_virtual_tokens=3), "prefix_tuning"),
    (peft.LilyConfig(), "lily"),
    (peft.PolyConfig(), "poly"),
])  # fmt: skip
def test_a_refusal_names_kind_reason_and_remedy(config, kind):
    with pytest.raises(UnsupportedModel) as refusal:
        refuse_adapter(config)
    why, remedy = REASONS[kind]
    message = str(refusal.value)
    assert message == f"{type(config).__name__} cannot be packed: PEFT's {kind}.\n  - {why}\n{remedy}"


EXACT = LoraConfig(use_dora=True, use_rslora=True, lora_dropout=0.1)


@pytest.mark.parametrize("config", [velora(init_type="random"), EXACT, None])
def test_what_is_exact_is_not_refused(config):
    refuse_adapter(config)
    assert config is None or table.verdict_of(config)[0] == "exact"


def test_the_trainer_refuses_before_data_is_prepared(monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(Dataset, "map", None)
        with pytest.raises(UnsupportedModel, match="velora_config"):
            packed_trainer(peft_config=velora())
        with pytest.raises(TypeError, match="not callable"):
            packed_trainer(peft_config=LoraConfig(**PLAIN))
    with pytest.raises(UnsupportedModel, match=r"velora_config \(adapter 'default'\)"):
        packed_trainer(model=get_peft_model(tiny.model(layers=1), velora()), peft_config=None)
    packed_trainer(arguments(packing=False), peft_config=velora())


def test_an_adapter_that_was_added_after_patching_is_refused():
    model = get_peft_model(tiny.model(layers=1), LoraConfig(**PLAIN))
    patch(model)
    model.add_adapter("second", velora())
    with pytest.raises(UnsupportedModel, match=r"velora_config \(adapter 'second'\)"):
        patch(model)
    model.delete_adapter("second")
    patch(model)


def test_transformers_own_adapters_are_found():
    model = tiny.model(layers=1)
    # `model.add_adapter` of transformers 5.24 asks for PEFT 0.22, which is not released; before, it called this.
    inject_adapter_in_model(velora(), model, adapter_name="own")
    with pytest.raises(UnsupportedModel, match=r"velora_config \(adapter 'own'\)"):
        patch(model)
    assert find_state(model) is None


def unknown_to_the_table(monkeypatch, tuner):
    rows = {kind: row for kind, row in table.results().items() if kind.split()[0] != tuner}
    monkeypatch.setattr(table, "results", lambda: rows)


@pytest.mark.parametrize("change", ["row", "source", "field"])
def test_an_unmeasured_kind_is_checked_on_the_model(monkeypatch, change):
    """With no row, with other code than was measured, with a field that no row knows: exact here, so accepted."""
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model, checked = get_peft_model(tiny.model(layers=1), config), watched(monkeypatch, candidates, "check")
    patch(model)
    assert not checked
    unpatch(model)
    if change == "row":
        unknown_to_the_table(monkeypatch, "lora")
    elif change == "source":
        monkeypatch.setattr(table, "source_of", lambda tuner: "another")
    else:
        config.megatron_config = {"tensor_model_parallel_size": 1}
    patch(model)
    assert checked == [(model,)]


def test_an_unmeasured_kind_that_leaks_is_refused_by_the_check(monkeypatch):
    config = peft.LilyConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny.model(layers=1), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    unknown_to_the_table(monkeypatch, "lily")
    with pytest.raises(ContaminationError):
        patch(model)
    assert find_state(model) is None


def test_a_config_class_of_nobody_knows_whom_is_unknown():
    @dataclasses.dataclass
    class Config:
        r: int = 8

    assert table.verdict_of(Config())[0] == "unknown"


def test_the_measurement_sees_a_leak_and_a_wrong_gradient():
    """The control of the measurement itself: rows without boundaries for it, and an average over the batch."""
    assert measure(KINDS["lily"])["isolation"] > VISIBLE
    found = measure(KINDS["lora velora_config"])
    assert_rounding(found["logits"], allowed=FLOAT64)
    assert found["gradients"] > 0.5
