"""NEFTune's noise in trainers without pads: as strong as in the padded run, row by row."""

from contextlib import nullcontext

import pytest
import tiny
import torch
from padded import padded
from selection import in_full
from tiny_models import small_model
from trl_trainers import build, build_packed, train

import trl_packfa
from trl_packfa import PackedSFTTrainer
from trl_packfa.layout.call_context import find_layout
from trl_packfa.patching.neftune import EmbeddingNoise

# Two padded micro-batches of other widths a step, for rows of both to meet in one.
NOISY = {
    "neftune_noise_alpha": 20.0, "max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
}  # fmt: skip


def loudest(trainer):
    """Train, and give the largest noise of each row by its ids."""
    backbone = trainer.model.model
    ids, found = [], {}

    def look(layer, args, kwargs):
        states, layout = args[0] if args else kwargs["hidden_states"], find_layout(args, kwargs)
        tokens = ids[-1]
        if not layer.training or tokens.shape != states.shape[:2]:  # a part of the first batch, compared
            return
        noise = (states - backbone.embed_tokens.weight[tokens]).detach().abs().amax(-1)
        rows = zip(tokens, noise, strict=True)
        if layout is not None:
            rows = zip(layout.split(tokens), layout.split(noise), strict=True)
        for row, loud in rows:
            name = tuple(row[row != 0].tolist())
            if name:  # no row of pads
                found[name] = max(found.get(name, 0.0), float(loud[row != 0].max()))

    backbone.embed_tokens.register_forward_pre_hook(lambda module, args: ids.append(args[0]))
    backbone.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    train(trainer)
    return found


def ratios(kind, make, tmp_path, **options):
    shared = {name: value for name, value in options.items() if name not in ("packing_strategy", "check_packing")}
    expected = loudest(build(kind, tmp_path, **NOISY, **shared))
    found = loudest(make(kind, tmp_path, **NOISY, **options))
    assert expected.keys() == found.keys() and len(found) >= 16
    return [loud / expected[name] for name, loud in found.items()]


def free(*args, **options):
    return trl_packfa.padding_free(build(*args, **options))


@pytest.mark.parametrize("kind", ["dpo", "sft", *in_full("kto", "reward")])
def test_neftunes_noise_is_as_loud_as_padded(kind, tmp_path):
    """The largest of some hundred uniform draws is within two per cent of their bound."""
    assert max(abs(ratio - 1) for ratio in ratios(kind, free, tmp_path)) < 0.02


@pytest.mark.parametrize("kind, options", [
    ("dpo", {"pad_to_multiple_of": 16}),
    ("kto", {"loss_type": "apo_zero_unpaired"}),
    pytest.param("reward", {"pad_to_multiple_of": 16}, marks=pytest.mark.slow),
    ("sft", {"pad_to_multiple_of": 16, "check_packing": False}),
    ("sft", {"packing_strategy": "minibatch", "check_packing": False}),
])  # fmt: skip
def test_neftunes_noise_in_a_recut_step_follows_each_rows_padded_micro_batch(kind, options, tmp_path):
    assert max(abs(ratio - 1) for ratio in ratios(kind, build_packed, tmp_path, **options)) < 0.02


@pytest.mark.parametrize(("kind", "make", "options"), [
    ("dpo", free, {}), ("dpo", build_packed, {}), ("sft", build_packed, {"check_packing": False}),
])  # fmt: skip
def test_negative_control_one_packed_row_is_softer(kind, make, options, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packfa.patching.forwards.noise_of_padded_rows", lambda *args: nullcontext())
    monkeypatch.setattr(PackedSFTTrainer, "_add_noise", lambda self: None)
    assert max(ratios(kind, make, tmp_path, **options)) < (0.9 if kind == "sft" else 0.7)


def test_negative_control_widths_of_the_recut_micro_batch_are_others(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packfa.trainers.preference.recutting.tell_rows", lambda mask, rows: None)
    assert max(abs(ratio - 1) for ratio in ratios("dpo", build_packed, tmp_path, pad_to_multiple_of=16)) > 0.1


def test_where_a_backbone_runs_by_document_steps_stay_as_padded(tmp_path):
    options = {"model": small_model("roformer"), "max_length": 32, **NOISY}
    assert "NEFTune's noise depends on the padded row" in build_packed("dpo", tmp_path, **options).cut_reason
    assert build_packed("dpo", tmp_path, **{**options, "neftune_noise_alpha": None}).cut_reason == ""


def test_the_hook_is_transformers_own_again(tmp_path):
    from transformers.integrations.neftune import activate_neftune, neftune_post_forward_hook

    model = trl_packfa.patch(tiny.model(layers=1), unpad=True).train()
    handle, table = activate_neftune(model, 5.0), model.get_input_embeddings()
    model(**padded(tiny.documents()))
    assert list(table._forward_hooks.values()) == [neftune_post_forward_hook]
    handle.remove()
    assert torch.equal(model(**padded(tiny.documents())).logits, model(**padded(tiny.documents())).logits)


def test_the_noise_of_each_token_follows_its_padded_row():
    noise, embedding = EmbeddingNoise(8.0), torch.nn.Embedding(9, 4096)
    embedding.register_forward_hook(noise)
    torch.nn.init.zeros_(embedding.weight)
    ids = torch.ones((1, 3), dtype=torch.long)
    noise.lengths = torch.tensor([[4, 16, 64]])
    widest = embedding(ids).abs().amax(-1)
    bound = 8.0 / (noise.lengths * 4096).sqrt()
    assert bool((widest <= bound).all()) and bool((widest > 0.99 * bound).all())
    noise.lengths = None
    bound = torch.tensor(8.0 / (3 * 4096) ** 0.5)  # as transformers has it
    assert 0.99 * bound < embedding(ids).abs().amax() <= bound
    assert torch.equal(embedding.eval()(ids), torch.zeros(1, 3, 4096))
