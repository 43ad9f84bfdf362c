"""Every type of transformers with images or sounds: what is committed is what running gives. `make test-all` measures
one type of each kind again, `make test-exhaustive` all."""

import composite_matrix as matrix
import pytest
import trainer_runs
from selection import one_of_each
from tiny_models.composites import composite_types

from trl_packfa.cli.main import main
from trl_packfa.patches.measured import composites
from trl_packfa.versions import installed_version

COMPARED = ("verdict", "level", "decoder", "blocks", "images")

KINDS = {name: tuple(map(result.get, ("verdict", "level", "blocks", "images")))
         for name, result in composites()["types"].items()}  # fmt: skip


# Ten seconds and more each.
SLOW = ("deepseek_vl_hybrid", "diffusion_gemma", "gemma4", "inkling2", "inkling_mm_model", "mistral_large4", "omniasr")


@pytest.mark.parametrize("model_type", one_of_each(composite_types(), KINDS, slow=SLOW))
def test_running_gives_what_is_committed(model_type):
    committed = composites()["types"][model_type]
    if committed["verdict"] == "not built":
        pytest.skip(committed["why"])
    if installed_version("transformers") != composites()["versions"]["transformers"]:
        pytest.skip("measured with another transformers")
    found = matrix.measure(model_type)
    assert [found.get(key) for key in COMPARED] == [committed.get(key) for key in COMPARED], found


EXACT = {name: KINDS[name][1] for name, result in composites()["types"].items() if result["verdict"] == "exact"}


@pytest.mark.parametrize("model_type", one_of_each(EXACT, EXACT, slow=SLOW))
def test_two_steps_in_the_trainer_are_the_padded_ones(model_type):
    found = matrix.train_type(model_type)
    assert trainer_runs.trains_as_padded(found) and found["saved"] > 0, found


def test_the_command_lists_them(capsys):
    assert main(["models", "--images"]) == 0
    printed = capsys.readouterr().out
    assert "qwen3_vl" in printed and "Qwen3VLTextModel" in printed and "exact" in printed
