"""The LM head that scores trained positions only, of packed and of padded rows: TRL's numbers, at less work."""

import os
import subprocess
import sys

import pretended_head
import pytest
import tiny
import torch
from calls import watched
from padded import padded
from tiny_models import small_model
from tolerance import assert_float32, assert_gradients, assert_low_precision, assert_trajectory, differs
from torch.utils.flop_counter import FlopCounterMode
from training import arguments, logs_of, lora_config, losses, packed_trainer, trained
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import add_fused_lm_head

from trl_packfa import patch, unpatch
from trl_packfa.kernels import devices
from trl_packfa.kernels.lm_head import chunked
from trl_packfa.kernels.lm_head.chunked import ChunkedHead, Head, LogProbs, Transform, positions_per_chunk
from trl_packfa.trainers.sft.lm_head import ensure_own_loss


def batch(count=40, *, seed=0):
    """One row whose first half, and three tokens more, are no labels."""
    ids = torch.randint(3, tiny.VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : count // 2] = -100
    labels[:, [25, 30, 31]] = -100
    return {"input_ids": ids, "labels": labels}


DEVICES = pytest.mark.parametrize("device", ["cpu", "gpu", "triton"])


def on(device, monkeypatch):
    """Take the code of a CPU, of a GPU, or of a GPU with Triton."""
    monkeypatch.setattr(devices, "is_cpu", lambda _: device == "cpu")
    if device == "triton":
        monkeypatch.setattr(chunked, "score_kernel", lambda logits: pretended_head.score_rows)


def with_heads(architecture="llama", *, kind=ChunkedHead, trains=True, **config):
    """The same model twice: with TRL's head, and with ours on top of it."""
    models = [tiny.model(architecture, layers=1, **config) for _ in range(2)]
    for model in models:
        add_fused_lm_head(model, outputs=("entropy", "is_top1"))
        model.get_output_embeddings().requires_grad_(trains)
    models[1].forward = kind(models[1], models[1].forward)
    return models


def assert_scores(actual, expected, *, names=("loss", "log_probs", "entropy")):
    assert torch.equal(actual.label_mask, expected.label_mask) and torch.equal(actual.is_top1, expected.is_top1)
    for name in names:
        assert_float32(getattr(actual, name).detach(), getattr(expected, name).detach().double())


@pytest.mark.parametrize("architecture", ["llama", "granite", "gemma2", "phi"])
def test_scores_are_trls_and_other_calls_the_models_own(architecture):
    """Plain, scaled, softly capped, with a bias. The control scores every position."""
    trl, ours = with_heads(architecture)
    expected, actual = (model(**batch(), fused_lm_head=True) for model in (trl, ours))
    assert_scores(actual, expected)
    everything = {**batch(), "labels": batch()["input_ids"]}
    assert differs(actual.log_probs, ours(**everything, fused_lm_head=True).log_probs)
    assert torch.equal(ours(**batch()).loss, trl(**batch()).loss)
    texts = [model.generate(batch()["input_ids"][:, :5], max_new_tokens=3) for model in (ours, trl)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("gradients", [True, False])
def test_what_nobody_asks_for_is_not_computed(gradients, monkeypatch):
    """Entropy and top-1 of steps that are not logged, slopes of an evaluation."""
    slopes = watched(monkeypatch, chunked.Chunk, "_write_slopes")
    hidden = torch.randn(20, 16, requires_grad=gradients)  # without, as a backbone without gradients leaves it
    _, entropy, is_top1 = LogProbs.apply(hidden, torch.randn(40, 16), None, torch.zeros(20).long(), Transform(), False)
    assert not entropy.any() and not is_top1.any()
    assert bool(slopes) == gradients


@DEVICES
@pytest.mark.parametrize("trains", ["hidden", "head", "both"])
@pytest.mark.parametrize("transform", [Transform(), Transform(0.3), Transform(2.0, 5.0)], ids=str)
def test_gradients_are_those_of_the_logits(trains, transform, device, monkeypatch):
    """Against float64, in tiles of 64 positions of which the last is short, for any gradient of the scores."""
    values = {"_TILE": 0, "_TILE_ON_GPU": 0, "_FEWEST": 64}
    for name, value in values.items():
        monkeypatch.setattr(chunked, name, value)
    on(device, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).requires_grad_(trains in (which, "both"))
        for shape, which in (((150, 16), "hidden"), ((40, 16), "head"), ((40,), "head"))
    )
    labels = torch.randint(0, 40, (150,), generator=generator)
    upstream = torch.randn(150, generator=generator)
    leaves = [t for t in (hidden, weight, bias) if t.requires_grad]
    log_probs, entropy, _ = LogProbs.apply(hidden, weight, bias, labels, transform, True)
    actual = torch.autograd.grad(log_probs, leaves, upstream)
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in (hidden, weight, bias)]
    logits = (doubles[0] @ doubles[1].t() + doubles[2]) * transform.scale
    if transform.softcap:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    oracle = torch.log_softmax(logits, -1)
    scored, trained = oracle.gather(-1, labels[:, None])[:, 0], [t for t in doubles if t.requires_grad]
    expected = torch.autograd.grad(scored, trained, upstream.double())
    assert_float32(entropy, -(oracle.exp() * oracle).sum(-1).detach())
    for ours, theirs in zip(actual, expected, strict=True):
        assert_float32(ours, theirs)
        assert differs(ours.roll(1, 0), theirs)


def test_of_equal_logits_the_first_is_the_likeliest():
    """As `argmax` has it: rows 3 and 7 of the head are the same, so their logits tie."""
    hidden, weight = torch.ones(3, 8), torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).abs().neg()
    weight[[3, 7]] = 1.0
    labels = torch.tensor([3, 7, 9])
    *_, is_top1 = LogProbs.apply(hidden, weight, None, labels, Transform(), True)
    assert is_top1.tolist() == ((hidden @ weight.t()).argmax(-1) == labels).tolist() == [True, False, False]


@DEVICES
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_trls(dtype, autocast, trains, device, monkeypatch):
    """Hidden states and head. A loss's gradient of one thousandth is no power of two; some tokens are likely."""
    on(device, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (150, 40))
    labels = torch.randint(0, 40, (150,), generator=generator)
    hidden[:20] = 2 * weight[labels[:20]]
    found = []
    for name, kind in {"ours": dtype, "trl": dtype, "oracle": torch.float64}.items():
        kind = torch.float32 if autocast and kind is dtype else kind
        given = (hidden.to(dtype).to(kind).requires_grad_(), weight.to(dtype).to(kind).requires_grad_(trains))
        with torch.autocast("cpu", dtype, enabled=autocast and name != "oracle"):
            if name == "ours":
                log_probs = LogProbs.apply(*given, None, labels, Transform(), True)[0]
            else:
                log_probs = ChunkedLogProbFunction.apply(*given, None, labels, 1.0, 16)[0]
        gradients = torch.autograd.grad(log_probs, given[: 1 + trains], torch.full_like(log_probs, 1e-3))
        assert [g.dtype for g in gradients] == [kind] * len(gradients)
        found.append([log_probs.detach(), *(g * 1e3 for g in gradients)])
    for i, (ours, trls, oracle) in enumerate(zip(*found, strict=True)):
        assert_low_precision(ours, trls, oracle, factor=3.0 if i else 2.0)


def test_tritons_kernel_scores_what_it_takes(monkeypatch):
    """Logits on CUDA in its dtypes, if Triton is there. A softcap stays with torch."""
    fits = torch.zeros(2, 8)
    assert chunked.score_kernel(fits) is None, "on a CPU"
    monkeypatch.setattr(devices, "runs_triton", lambda device: True)
    assert chunked.score_kernel(fits.double()) is None
    monkeypatch.setattr(chunked, "score_kernel", lambda logits: pretended_head.score_rows)
    given = torch.zeros(3, 16), torch.zeros(8, 16), None, torch.zeros(3).long()
    for transform, kind in ((Transform(2.0), chunked.KernelChunk), (Transform(2.0, 5.0), chunked.Chunk)):
        assert [type(chunk) for _, chunk in chunked.Chunks(*given, transform)] == [kind]


def test_tritons_kernel_by_its_interpreter():
    """Against float64, as its stand-in in the tests above."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, pretended_head.__file__], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(("dtype", "words", "on_cpu", "positions"), [
    (torch.float32, 32_000, True, 512),
    (torch.bfloat16, 32_000, True, 128),
    (torch.bfloat16, 128_256, False, 1024),
    (torch.float32, 262_144, False, 512),
    (torch.bfloat16, 10**7, False, 128),
])  # fmt: skip
def test_chunks_are_half_a_gigabyte_at_most_unless_words_are_very_many(dtype, words, on_cpu, positions):
    assert positions_per_chunk(dtype, words, on_cpu=on_cpu) == positions


def test_prompts_cost_nothing_and_a_frozen_head_is_multiplied_twice():
    """Counted: what the head adds to the layers is two products of the trained positions; TRL's, of all."""
    trl, ours = with_heads(trains=False)
    for model in (trl, ours):
        model.lm_head.weight.requires_grad_(False)

    def flops(loss):
        with FlopCounterMode(display=False) as counter:
            loss().backward()
        return counter.get_total_flops()

    by_trl, by_us = (flops(lambda model=model: model(**batch(), fused_lm_head=True).loss) for model in (trl, ours))
    layers = flops(lambda: ours.model(input_ids=batch()["input_ids"]).last_hidden_state.sum())
    product, trained = 2 * tiny.VOCAB * 64, int((batch()["labels"][:, 1:] != -100).sum())
    assert by_us - layers == product * 2 * trained
    assert by_trl - layers >= product * 2 * 39  # and another that the counter does not know, in place


def test_no_trained_position_is_a_zero_with_a_gradient():
    _, ours = with_heads()
    nothing = batch() | {"labels": torch.full((1, 40), -100)}
    loss = ours(**nothing, fused_lm_head=True).loss
    loss.backward()
    assert loss == 0 and not ours.model.norm.weight.grad.any()


def test_a_head_that_is_wrong_is_not_taken(monkeypatch, caplog):
    model, broken = (tiny.model("granite", layers=1) for _ in range(2))
    for each in (model, broken):
        add_fused_lm_head(each, outputs=("entropy", "is_top1"))
    assert isinstance(ensure_own_loss(model, seed=0), ChunkedHead)
    monkeypatch.setattr(Transform, "of", lambda config: Transform(3.0))
    assert type(ensure_own_loss(broken, seed=0)) is Head
    assert "the model's own logits are used" in caplog.text
    assert_scores(*(each(**batch(), fused_lm_head=True) for each in (broken, model)))


@pytest.mark.parametrize(("attribute", "value", "why"), [
    ("is_floating_point", lambda self: False, "no plain weight"),
    ("ds_shape", (tiny.VOCAB, 64), "split over processes"),
], ids=["integers", "split"])  # fmt: skip
def test_a_head_whose_weight_is_not_plain_is_the_models_own(attribute, value, why, caplog):
    """When it is chosen, and if the weight is split only later, as under FSDP2."""
    plain, chosen, later = (tiny.model(layers=1) for _ in range(3))
    heads = [ensure_own_loss(model, seed=0) for model in (plain, later)]
    weight = type("Weight", (torch.nn.Parameter,), {attribute: value})
    for model in (chosen, later):
        model.lm_head.weight = weight(model.lm_head.weight.data)
    assert type(ensure_own_loss(chosen, seed=0)) is Head and why in caplog.text
    assert [type(head) for head in heads] == [ChunkedHead] * 2 and [why in h.refusal() for h in heads] == [False, True]
    expected, *found = (model(**batch(), fused_lm_head=True) for model in (plain, chosen, later))
    for each in found:
        assert_scores(each, expected)


@pytest.mark.parametrize("kind", [Head, ChunkedHead])
def test_routers_losses_are_the_models_own(kind):
    """Asked for by argument; the loss of the labels stays."""
    model = small_model("mixtral")
    model.forward = kind(model)
    given = {"fused_lm_head": True, **batch()}
    plain, balanced = (model(**given, output_router_logits=asked) for asked in (False, True))
    assert_scores(balanced, plain)
    assert (
        plain.aux_loss is None and balanced.aux_loss == model(batch()["input_ids"], output_router_logits=True).aux_loss
    )


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_training_measures_what_is_logged(tmp_path, logging_steps):
    """Entropy and accuracy of logged steps are what TRL logs for them; losses are the same."""
    trainers = [packed_trainer(arguments(out=tmp_path / name, logging_steps=logging_steps, max_steps=4),
                               peft_config=lora_config()) for name in ("trl", "ours")]  # fmt: skip
    head = trainers[0]._head
    head.module.module.forward = head.module.original
    head.module = None
    trl, ours = map(trained, trainers)
    assert_trajectory(losses(ours), losses(trl))
    for own, theirs in zip(logs_of(ours), logs_of(trl), strict=True):
        assert {"entropy", "mean_token_accuracy"} <= set(own)
        if logging_steps == 1:
            figures = ([(entry["entropy"], entry["mean_token_accuracy"])] for entry in (own, theirs))
            assert_trajectory(*figures)


OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def padded_batch():
    made = padded(tiny.documents())
    labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    labels[:, :4] = -100
    return {**made, "labels": labels}


def run_padded(model, **options):
    model.zero_grad()
    output = model(**padded_batch(), fused_lm_head=True, **options)
    (output.loss + 0.1 * output.entropy.sum()).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"cast_lm_head_to_fp32": True}], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite", "mamba2", "phi"])
def test_scores_of_padded_rows_are_trls(model_type, options):
    """Plain, softly capped, scaled, behind a causal LM of ours, with a bias."""
    model = small_model(model_type)
    add_fused_lm_head(model, outputs=OUTPUTS, **options)
    expected, expected_grads = run_padded(model)
    patch(model, unpad=True)
    actual, grads = run_padded(model)
    assert_scores(actual, expected, names=("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits"))
    assert_gradients(grads, expected_grads)
    other, _ = run_padded(model, num_items_in_batch=7)
    assert_float32(other.loss, -actual.log_probs.sum().double() / 7)
    unpatch(model)
    assert torch.equal(run_padded(model)[0].log_probs, expected.log_probs)


def test_less_is_multiplied():
    model = tiny.model(layers=1)
    add_fused_lm_head(model)

    def flops():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**padded_batch(), fused_lm_head=True)
        return counter.get_total_flops()

    trl = flops()
    patch(model, unpad=True)
    labelled, places = int((padded_batch()["labels"][:, 1:] != -100).sum()), padded_batch()["labels"][:, 1:].numel()
    saved = 2 * (places - labelled) * tiny.VOCAB * model.config.hidden_size
    assert trl - flops() >= saved


def test_our_head_selects_positions_by_itself():
    """It runs on top of the padded padded_batch without pads, or below; the control: other labels."""
    model, twin = (tiny.model() for _ in range(2))
    model.forward = ChunkedHead(model)
    patch(model, unpad=True)
    patch(twin, unpad=True)
    twin.forward = ChunkedHead(twin)
    actual, expected = (each(**padded_batch(), fused_lm_head=True) for each in (model, twin))
    assert_scores(actual, expected)
    everything = padded_batch()["labels"].masked_fill(padded_batch()["labels"] == -100, 3)
    assert differs(model(**{**padded_batch(), "labels": everything}, fused_lm_head=True).log_probs, actual.log_probs)


def test_fields_without_labels_and_calls_without_the_head():
    """Fields that were not asked for are none, a loss of nothing stays connected, other calls are the model's own."""
    model = tiny.model().eval()
    add_fused_lm_head(model)
    plain = model(**padded_batch())
    patch(model, unpad=True)
    output = model(**padded_batch(), fused_lm_head=True)
    assert output.entropy is None and output.mean_logits is None and output.log_probs.requires_grad
    loss = model(
        **{**padded_batch(), "labels": torch.full_like(padded_batch()["labels"], -100)}, fused_lm_head=True
    ).loss
    loss.backward()
    assert loss == 0 and all(p.grad is not None for p in model.model.layers.parameters())
    found = model(**padded_batch())
    assert found.logits.shape == plain.logits.shape
    assert_float32(found.loss.detach(), plain.loss.detach().double())
