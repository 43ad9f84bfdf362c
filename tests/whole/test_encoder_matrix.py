"""Every encoder type by head: what is committed is what running gives. `make test-all` measures one type of each kind
again, `make test-exhaustive` all."""

import encoder_matrix as matrix
import pytest
import trainer_runs
from selection import one_of_each
from tiny_models.encoders import encoder_types, heads_of
from tolerance import VISIBLE, assert_rounding
from transformers import Trainer

from trl_packfa.cli.main import main
from trl_packfa.patches.measured import encoders
from trl_packfa.versions import installed_version

COMPARED = ("verdict", "level", "left pads")


def results_of(heads):
    return {head: tuple(map(result.get, COMPARED)) for head, result in heads.items()}


KINDS = {name: tuple(sorted({(result["verdict"], result.get("level", "")) for result in heads.values()}))
         for name, heads in encoders()["types"].items()}  # fmt: skip


@pytest.mark.parametrize("model_type", one_of_each(encoder_types(), KINDS))
def test_running_gives_what_is_committed(model_type):
    if installed_version("transformers") != encoders()["versions"]["transformers"]:
        pytest.skip("measured with another transformers")
    found = {head: matrix.measure_head(model_type, head) for head in heads_of(model_type)}
    assert results_of(found) == results_of(encoders()["types"][model_type]), found


EXACT = {(name, head): (head, result["level"]) for name, heads in encoders()["types"].items()
         for head, result in heads.items() if result["verdict"] == "exact"}  # fmt: skip


# Their labels become inputs of the decoder, with pads of their own.
WITH_PADS = [("bart", "MaskedLM"), ("mbart", "MaskedLM"), ("mvp", "MaskedLM")]


@pytest.mark.parametrize("case", one_of_each(EXACT, EXACT), ids=" ".join)
def test_two_steps_in_its_trainer_are_the_padded_ones(case):
    if case[1] == "Embeddings":
        pytest.importorskip("sentence_transformers")
    found = matrix.train_head(*case)
    assert trainer_runs.trains_as_padded(found), found
    assert (found["saved"] == 0) == (case[1] == "QuestionAnswering" or case in WITH_PADS)


def test_rows_that_see_each_other_train_otherwise(monkeypatch):
    """The negative control of the comparison above. The check before it would see them, and run rows in groups."""
    model, train = matrix.small_encoder("bert", "MaskedLM"), Trainer.train

    def leaking(self):
        with matrix.rows_that_see_each_other():
            return train(self)

    monkeypatch.setattr(Trainer, "train", leaking)
    found = trainer_runs.compare_head(model, "MaskedLM", check_first_batch=False)
    assert found["loss"] > 10 * trainer_runs.LIMIT and not trainer_runs.trains_as_padded(found)


def test_a_trainer_that_raises_is_a_result():
    found = matrix.train_head("t5", "SequenceClassification")
    assert found["raises"].startswith("UnsupportedModel: Trainer.model cannot run without its pads")
    assert not trainer_runs.trains_as_padded(found)


def test_a_leak_is_seen(monkeypatch):
    """A stack whose rows see each other, although it was measured exact."""
    measured = matrix.run_padded
    monkeypatch.setattr(matrix, "rounded", dict)
    exact = matrix.measure_head("bert", "TokenClassification")
    assert exact["verdict"] == "exact" and exact["control"] > VISIBLE
    assert_rounding(exact["outputs"])

    def leaking(model, batch):
        with matrix.rows_that_see_each_other():
            return measured(model, batch)

    monkeypatch.setattr(matrix, "run_padded", leaking)
    assert matrix.measure_head("bert", "TokenClassification")["verdict"] == "differs"


def test_the_command_lists_them(capsys):
    assert main(["models", "--encoders"]) == 0
    printed = capsys.readouterr().out
    assert "modernbert" in printed and "multiple choice" in printed and "groups" in printed
