"""Every causal-LM type through the trainer, in full and with an adapter, beside TRL's on padded batches: what is
committed is what running gives. `make test-all` trains a few types again, `make test-exhaustive` all."""

import pytest
import training_matrix as matrix
from faults import wrap
from selection import exhaustive

from trl_packfa.layout.call_context import find_layout
from trl_packfa.patches.measured import training
from trl_packfa.trainers.sft.check_gate import CheckGate
from trl_packfa.versions import installed_version

# Sizes that the config does not say, or by other names; a decoder that is called past its backbone; a head with more
# than a matrix.
SAMPLE = ("gemma4_text", "blt", "opt", "bart", "dory")
OTHERS = [name for name in training()["types"] if name not in SAMPLE]


def test_trained_types_are_exact_ones():
    assert {*SAMPLE} <= {*training()["types"]} <= {*matrix.trained_types()}
    assert all(found.keys() == matrix.WAYS.keys() for found in training()["types"].values())


@pytest.mark.parametrize("way", matrix.WAYS)
@pytest.mark.parametrize("model_type", [*SAMPLE, *exhaustive(*OTHERS)])
def test_training_gives_what_is_committed(model_type, way):
    if installed_version("transformers") != training()["versions"]["transformers"]:
        pytest.skip("measured with another transformers")
    found, committed = matrix.measure_way(model_type, way), training()["types"][model_type][way]
    compared = ("verdict", "beside", "mfu")
    assert [found.get(key) for key in compared] == [committed.get(key) for key in compared], found
    assert (found.get("head") is None) == (committed.get("head") is None), "the head that trains is compared, too"


def leaks(override, args, kwargs):
    attended, weights = override(*args, **kwargs)
    return (attended if find_layout((), kwargs) is None else attended + attended[:, :1]), weights


def test_a_leak_is_refused_and_would_train_to_other_numbers(monkeypatch):
    """It comes after the check, so the first batch shows it."""
    assert matrix.measure_way("llama", "full")["verdict"] == "same"
    breaks = lambda gate, *args: wrap(gate.trainer.model, "model.layers.1.self_attn", leaks)  # noqa: E731
    monkeypatch.setattr(CheckGate, "check", breaks)
    monkeypatch.setattr(CheckGate, "tell", lambda gate, report: None)  # there is none
    found = matrix.measure_way("llama", "full")
    assert found["verdict"] == "refused" and "first training batch" in found["why"]
    monkeypatch.setattr(CheckGate, "check_first_batch", lambda gate, *args: None)
    found = matrix.measure_way("llama", "full")
    assert found["verdict"] == "differs" and found["loss"] > 1e-2, found


def test_a_type_that_trl_cannot_train_is_listed_as_such():
    found = matrix.measure_way("doge", "full")
    assert found["verdict"] == "not trained by TRL" and "IndexError" in found["why"], found
