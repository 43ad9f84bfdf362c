"""Every encoder type by head: what is committed is what running gives. `make test-all` measures one type of each kind
again, `make test-exhaustive` all."""

import encoder_matrix as matrix
import pytest
from selection import one_of_each
from tiny_models.encoders import encoder_types
from tolerance import VISIBLE, assert_rounding

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
    found = matrix.measure_type(model_type)
    assert results_of(found) == results_of(encoders()["types"][model_type]), found


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
