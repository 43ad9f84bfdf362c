"""A frozen LM head in two products on CUDA: TRL's numbers and gradients, by TRL's own torch code for its kernels."""

from types import SimpleNamespace

import pytest
import tolerance
import torch
from test_head import assert_scores, batch, model_without_labels, with_heads
from tolerance import assert_float32, assert_gradients, assert_low_precision, assert_recomputed, differs
from torch.utils.flop_counter import FlopCounterMode
from training import arguments, lora_config, losses, packed_trainer, trained
from trl.kernels import ChunkedLogProbFunction, chunked_logprob

from trl_packfa.kernels.lm_head import frozen
from trl_packfa.kernels.lm_head.chunked import Transform
from trl_packfa.kernels.lm_head.frozen import FrozenHead, FrozenLogProbs, positions_per_tile, scoring_kernels
from trl_packfa.trainers.sft import lm_head
from trl_packfa.trainers.sft.lm_head import ensure_own_loss

NAMES = ("log_probs", "entropy", "is_top1")


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """A CPU in the place of a GPU, and tiles of 64 positions, of which the last is short."""
    monkeypatch.setattr(FrozenHead, "_is_for", lambda self, weight, bias: not weight.requires_grad)
    monkeypatch.setattr(frozen, "positions_per_tile", lambda words: 64)


def drawn(dtype=torch.float32, count=150, words=40):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (count, words))
    bias = torch.randn(words, generator=generator).to(dtype)
    labels = torch.randint(0, words, (count,), generator=generator)
    return hidden.requires_grad_(), weight, bias, labels, torch.randn(count, generator=generator)


def by_trl(hidden, weight, bias, labels, transform):
    options = (1.0, 16, transform.softcap, transform.scale, NAMES)
    log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(hidden, weight, bias, labels, *options)
    return log_probs, entropy, is_top1


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("transform", [Transform(), Transform(0.3), Transform(2.0, 5.0)], ids=str)
def test_scores_and_gradients_are_trls(transform, biased):
    hidden, weight, bias, labels, upstream = drawn()
    given = (hidden, weight, bias if biased else None, labels, transform)
    theirs, ours = by_trl(*given), FrozenLogProbs.apply(*given, True)
    for mine, trls in zip(ours[:2], theirs[:2], strict=True):
        assert_float32(mine.detach(), trls.detach().double())
    assert torch.equal(ours[2], theirs[2])
    (mine,), (trls,) = (torch.autograd.grad(scores[0], hidden, upstream) for scores in (ours, theirs))
    assert_recomputed(mine, trls)
    assert differs(mine.roll(1, 0), trls)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_trls(dtype, autocast):
    """Rounded once: a loss's gradient of one thousandth is no power of two."""
    hidden, weight, _, labels, _ = drawn(torch.float32 if autocast else dtype)
    upstream = torch.full((len(labels),), 1e-3)
    exact = by_trl(hidden.double(), weight.double(), None, labels, Transform())[0]
    (oracle,) = torch.autograd.grad(exact, hidden, upstream.to(exact.dtype))
    with torch.autocast("cpu", dtype, enabled=autocast):
        theirs = by_trl(hidden, weight, None, labels, Transform())[0]
        ours = FrozenLogProbs.apply(hidden, weight, None, labels, Transform(), False)[0]
    (mine,), (trls,) = (torch.autograd.grad(scores, hidden, upstream) for scores in (ours, theirs))
    assert mine.dtype == trls.dtype == hidden.dtype
    assert_low_precision(ours, theirs, exact, factor=2.0)
    assert_low_precision(mine * 1e3, trls * 1e3, oracle.double() * 1e3, factor=3.0)


def test_it_is_multiplied_twice():
    """Counted: TRL multiplies thrice, of which the last is done in place, unseen by the counter."""
    hidden, weight, _, labels, upstream = drawn()
    counts = []
    for scores in (lambda: FrozenLogProbs.apply(hidden, weight, None, labels, Transform(), True)[0],
                   lambda: by_trl(hidden, weight, None, labels, Transform())[0]):  # fmt: skip
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(scores(), hidden, upstream)
        counts.append(counter.get_total_flops())
    assert counts[0] == 2 * 2 * hidden.numel() * len(weight) <= counts[1]


@pytest.mark.parametrize("gradients", [True, False])
def test_what_nobody_asks_for_is_not_computed(gradients, monkeypatch):
    """Entropy and top-1 of steps that are not logged, slopes of an evaluation."""
    asked, kernels = [], scoring_kernels()
    spy = kernels._replace(
        fold_in_torch=lambda *args, **options: asked.append(options) or kernels.fold_in_torch(*args, **options),
        slope_in_torch=lambda *args, **options: asked.append("slope") or kernels.slope_in_torch(*args, **options),
    )
    monkeypatch.setattr(frozen, "scoring_kernels", lambda: spy)
    hidden, weight, _, labels, _ = drawn(count=20)
    hidden = hidden if gradients else hidden.detach()  # as a backbone without gradients leaves it
    _, entropy, is_top1 = FrozenLogProbs.apply(hidden, weight, None, labels, Transform(), False)
    assert not entropy.any() and not is_top1.any()
    assert not asked[0]["HAS_ENTROPY"] and not asked[0]["HAS_IS_TOP1"]
    assert ("slope" in asked) == gradients


@pytest.mark.parametrize("architecture", ["llama", "granite", "phi"])
def test_a_models_loss_is_trls(architecture):
    trl, ours = with_heads(architecture, kind=FrozenHead, trains=False)
    expected, actual = (model(**batch(), fused_lm_head=True) for model in (trl, ours))
    assert_scores(actual, expected)
    for model, output in ((trl, expected), (ours, actual)):
        output.loss.backward()
        model.grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_gradients(ours.grads, trl.grads)
    assert differs(actual.log_probs, model_without_labels(ours).log_probs)


def test_a_head_that_trains_is_trls():
    trl, ours = with_heads(kind=FrozenHead)
    expected, actual = (model(**batch(), fused_lm_head=True).loss for model in (trl, ours))
    assert torch.equal(actual, expected)
    actual.backward()
    assert ours.lm_head.weight.grad.any()


@pytest.mark.parametrize("trains", [False, True])
def test_it_is_chosen_by_measuring(trains, monkeypatch):
    """Of models on CUDA, for a head that is frozen, where its log-probabilities are the model's own."""
    kinds = []
    monkeypatch.setattr(lm_head, "can_be_frozen", lambda weight: True)
    for wrong in (False, True):
        model, _ = with_heads("granite", kind=FrozenHead, trains=trains)
        if wrong:
            monkeypatch.setattr("trl_packfa.kernels.lm_head.chunked.Transform.of", lambda config: Transform(3.0))
        with monkeypatch.context() as context:
            context.setattr(lm_head, "_cheapest", lambda model, own=lm_head._cheapest: own(OnGpu(model)))
            kinds.append(type(ensure_own_loss(model, seed=0)))
    assert kinds == ([type(None)] * 2 if trains else [FrozenHead, type(None)])


class OnGpu:
    """A model that says it lies on one."""

    def __init__(self, model):
        self.model = model

    def get_input_embeddings(self):
        return SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda")))

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()


def test_a_run_is_the_run_with_trls_head(monkeypatch, tmp_path):
    scored = []
    for kind in (FrozenHead, None):
        monkeypatch.setattr(lm_head, "_cheapest", lambda model, kind=kind: kind)
        args = arguments(out=tmp_path / str(kind), logging_steps=1, max_steps=4)
        trainer = trained(packed_trainer(args, peft_config=lora_config()))
        assert type(trainer._head.module) is (kind or type(None))
        scored.append(losses(trainer))
    tolerance.assert_trajectory(scored[0], scored[1])


@pytest.mark.parametrize("change", [lambda tile, targets: None, None])
def test_another_trl_keeps_its_own_head(change, monkeypatch):
    assert scoring_kernels.__wrapped__() is not None
    monkeypatch.setattr(chunked_logprob, "_backward_tile", change)
    assert scoring_kernels.__wrapped__() is None


@pytest.mark.parametrize(("words", "positions"), [(128_256, 2048), (32_000, 4096), (262_144, 1024), (10**7, 128)])
def test_tiles_are_half_a_gigabyte_at_most(words, positions):
    assert positions_per_tile(words) == positions
