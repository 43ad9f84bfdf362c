"""Types with images or sounds, encoders by head, and causal-LM types through the trainer, beside TRL's own trainer or
transformers' on padded batches: what is committed is what running gives. `make test-all` measures one of each kind
again, `make test-exhaustive` all."""

import composite_matrix
import encoder_matrix
import pytest
import trainer_runs
import training_matrix
from faults import wrap
from selection import exhaustive, one_of_each
from tiny_models.composites import composite_types
from tiny_models.encoders import encoder_types, heads_of
from tolerance import VISIBLE, assert_rounding
from transformers import Trainer

from trl_packfa.cli.main import main
from trl_packfa.layout.call_context import find_layout
from trl_packfa.patches.measured import composites, encoders, training
from trl_packfa.trainers.sft.check_gate import CheckGate
from trl_packfa.versions import installed_version

COMPOSITES, ENCODERS, TRAINED = (table()["types"] for table in (composites, encoders, training))


def require_version_of(table):
    if installed_version("transformers") != table()["versions"]["transformers"]:
        pytest.skip("measured with another transformers")


def figures(result, *names):
    return tuple(map(result.get, names))


# Ten seconds and more each.
SLOW = (
    "deepseek_vl_hybrid", "diffusion_gemma", "gemma4", "glm5_next", "inkling2", "inkling_mm_model", "mistral_large4",
    "omniasr",
)  # fmt: skip
COMPOSITE_KINDS = {name: figures(of, "verdict", "level", "bidirectional", "images") for name, of in COMPOSITES.items()}
EXACT_COMPOSITES = {name: of["level"] for name, of in COMPOSITES.items() if of["verdict"] == "exact"}


@pytest.mark.parametrize("model_type", one_of_each(composite_types(), COMPOSITE_KINDS, slow=SLOW))
def test_types_with_images_are_what_is_committed(model_type):
    committed = COMPOSITES[model_type]
    if committed["verdict"] == "not built":
        pytest.skip(committed["why"])
    require_version_of(composites)
    found, compared = composite_matrix.measure(model_type), ("verdict", "level", "decoder", "bidirectional", "images")
    assert figures(found, *compared) == figures(committed, *compared), found


@pytest.mark.parametrize("model_type", one_of_each(EXACT_COMPOSITES, EXACT_COMPOSITES, slow=SLOW))
def test_types_with_images_train_as_padded(model_type):
    found = composite_matrix.train_type(model_type)
    assert trainer_runs.trains_as_padded(found) and found["saved"] > 0, found


@pytest.mark.parametrize(("flag", "words"), [
    ("--images", ("qwen3_vl", "Qwen3VLTextModel", "exact")),
    ("--encoders", ("modernbert", "multiple choice", "groups")),
])  # fmt: skip
def test_the_command_lists_them(flag, words, capsys):
    assert main(["models", flag]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


ENCODER_KINDS = {name: tuple(sorted({(of["verdict"], of.get("level", "")) for of in heads.values()}))
                 for name, heads in ENCODERS.items()}  # fmt: skip
TRAINED_HEADS = {(name, head): (head, of["level"]) for name, heads in ENCODERS.items() for head, of in heads.items()
                 if of["verdict"] == "exact" and "raises" not in of["trainer"]}  # fmt: skip
# Their labels become inputs of the decoder, with pads of their own.
WITH_PADS = [("bart", "MaskedLM"), ("mbart", "MaskedLM"), ("mvp", "MaskedLM")]


@pytest.mark.parametrize("model_type", one_of_each(encoder_types(), ENCODER_KINDS))
def test_heads_of_encoders_are_what_is_committed(model_type):
    require_version_of(encoders)
    found = {head: encoder_matrix.measure_head(model_type, head) for head in heads_of(model_type)}
    ours, committed = ({head: figures(of, "verdict", "level", "left pads") for head, of in heads.items()}
                       for heads in (found, ENCODERS[model_type]))  # fmt: skip
    assert ours == committed, found


@pytest.mark.parametrize("case", one_of_each(TRAINED_HEADS, TRAINED_HEADS), ids=" ".join)
def test_heads_of_encoders_train_as_padded(case):
    if case[1] == "Embeddings":
        pytest.importorskip("sentence_transformers")
    found = encoder_matrix.train_head(*case)
    assert trainer_runs.trains_as_padded(found), found
    assert (found["saved"] == 0) == (case[1] == "QuestionAnswering" or case in WITH_PADS)


def test_negative_control_rows_that_see_each_other_train_otherwise(monkeypatch):
    """The check before it would see them, and run rows in groups."""
    model, train = encoder_matrix.small_encoder("bert", "MaskedLM"), Trainer.train

    def leaking(self):
        with encoder_matrix.rows_that_see_each_other():
            return train(self)

    monkeypatch.setattr(Trainer, "train", leaking)
    found = trainer_runs.compare_head(model, "MaskedLM", check_first_batch=False)
    assert found["loss"] > 10 * trainer_runs.LIMIT and not trainer_runs.trains_as_padded(found)


def test_a_trainer_that_raises_is_a_result():
    found = encoder_matrix.train_head("t5", "SequenceClassification")
    assert found["raises"].startswith("UnsupportedModel: Trainer.model cannot run without its pads")
    assert not trainer_runs.trains_as_padded(found)


def test_a_stack_whose_rows_see_each_other_is_measured_as_such(monkeypatch):
    measured = encoder_matrix.run_padded
    monkeypatch.setattr(encoder_matrix, "rounded", dict)
    exact = encoder_matrix.measure_head("bert", "TokenClassification")
    assert exact["verdict"] == "exact" and exact["control"] > VISIBLE
    assert_rounding(exact["outputs"])

    def leaking(model, batch):
        with encoder_matrix.rows_that_see_each_other():
            return measured(model, batch)

    monkeypatch.setattr(encoder_matrix, "run_padded", leaking)
    assert encoder_matrix.measure_head("bert", "TokenClassification")["verdict"] == "differs"


# Sizes that the config does not say, or by other names; a decoder that is called past its backbone; a head with more
# than a matrix.
SAMPLE = ("gemma4_text", "blt", "opt", "bart", "dory")
OTHERS = [name for name in TRAINED if name not in SAMPLE]


def test_trained_types_are_exact_ones():
    assert {*SAMPLE} <= {*TRAINED} <= {*training_matrix.trained_types()}
    assert all(found.keys() == training_matrix.WAYS.keys() for found in TRAINED.values())


@pytest.mark.parametrize("way", training_matrix.WAYS)
@pytest.mark.parametrize("model_type", [*SAMPLE, *exhaustive(*OTHERS)])
def test_training_is_what_is_committed(model_type, way):
    require_version_of(training)
    measured = training_matrix.measure_way(model_type, way), TRAINED[model_type][way]
    # Whether float32 is too coarse depends on the machine.
    found, committed = (of.get("float64", of) for of in measured)
    compared = ("verdict", "beside", "mfu")
    assert figures(found, *compared) == figures(committed, *compared), found
    assert (found.get("head") is None) == (committed.get("head") is None), "the head that trains is compared, too"


def leaks(override, args, kwargs):
    attended, weights = override(*args, **kwargs)
    return (attended if find_layout((), kwargs) is None else attended + attended[:, :1]), weights


def test_a_leak_is_refused_and_would_train_to_other_numbers(monkeypatch):
    """It comes after the check, so the first batch shows it."""
    assert training_matrix.measure_way("llama", "full")["verdict"] == "same"
    breaks = lambda gate, *args: wrap(gate.trainer.model, "model.layers.1.self_attn", leaks)  # noqa: E731
    monkeypatch.setattr(CheckGate, "check", breaks)
    monkeypatch.setattr(CheckGate, "tell", lambda gate, report: None)  # there is none
    found = training_matrix.measure_way("llama", "full")
    assert found["verdict"] == "refused" and "first training batch" in found["why"]
    monkeypatch.setattr(CheckGate, "check_first_batch", lambda gate, *args: None)
    found = training_matrix.measure_way("llama", "full")
    assert found["verdict"] == "differs" and found["loss"] > 1e-2, found


def test_a_type_that_trl_cannot_train_is_listed_as_such():
    found = training_matrix.measure_way("doge", "full")
    assert found["verdict"] == "not trained by TRL" and "IndexError" in found["why"], found
