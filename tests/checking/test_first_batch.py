"""The first batch of a training is checked: what only real documents or the real collator bring is seen."""

import pytest
import tiny
import torch
from calls import watched
from faults import wrap
from selection import in_full
from tiny_models import small_model
from training import arguments, losses, packed_trainer, trained
from transformers import TrainerCallback

from trl_packfa import DataCollatorForPacking, PackedSFTTrainer
from trl_packfa.checking import check_batch, first_batch
from trl_packfa.comparison import TOLERANCES
from trl_packfa.errors import ContaminationError
from trl_packfa.kernels.lm_head.chunked import ChunkedHead, LogProbs
from trl_packfa.layout.call_context import find_layout
from trl_packfa.patching.state import unpadding_of

LAYER = "model.layers.1.self_attn"


class BreakAfterTheCheck(TrainerCallback):
    """Lets documents see the first one, once the check of its own documents is over."""

    def __init__(self, model):
        self.model = model

    def on_step_begin(self, args, state, control, **kwargs):
        def leaks(override, args, kwargs):
            attended, weights = override(*args, **kwargs)
            return (attended if find_layout((), kwargs) is None else attended + attended[:, :1]), weights

        wrap(self.model, LAYER, leaks)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"packing_strategy": "bfd"}], ids=["fp32", "bf16", "bfd"])
def test_a_leak_that_only_the_first_batch_shows_stops_the_training(options, tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path, **options), model=tiny.model(layers=2))
    trainer.add_callback(BreakAfterTheCheck(trainer.model.get_base_model()))
    with pytest.raises(ContaminationError, match="not exact on the first training batch") as error:
        trainer.train()
    assert trainer.check_report.is_exact, "the control: the check before saw nothing"
    assert "packing=False" in str(error.value)


class OwnStep(PackedSFTTrainer):
    """A user's class, whose micro-batches are TRL's padded ones."""

    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


def test_the_padded_first_batch_of_a_users_own_step_is_compared(tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path), cls=OwnStep)
    report, policy = trained(trainer).check_report, unpadding_of(trainer.model)
    assert report["padded batch"].holds and report["padded batch"].allowed > 0 and "first batch" not in report
    assert policy.watch is None and policy.trained == policy.tokens, "calls of the check are counted"
    other = packed_trainer(arguments(out=tmp_path / "other"), cls=OwnStep, model=tiny.model(layers=2))
    other.add_callback(BreakAfterTheCheck(other.model.get_base_model()))
    with pytest.raises(ContaminationError, match="LlamaForCausalLM: the first batch without its pads is not exact"):
        other.train()
    assert other.check_report.is_exact, "the control: the check before saw nothing"


STRATEGY = {"packing_strategy": "minibatch"}


@pytest.mark.parametrize("options", [{}, {"bf16": True}, STRATEGY], ids=["fp32", "bf16", "mini"])
def test_an_exact_first_batch_is_in_the_report(options, tmp_path):
    report = trained(packed_trainer(arguments(out=tmp_path, **options))).check_report
    assert report.tokens == "known" and report["first batch"].holds and report["first batch"].allowed > 0
    written = {row["kind"]: row["difference"] for row in report.to_dict()["rows"]}
    assert written["first batch"] == report["first batch"].difference


def test_the_check_of_the_first_batch_changes_no_loss(tmp_path, monkeypatch):
    found = [losses(trained(packed_trainer(arguments(out=tmp_path / str(checks), check_packing=checks))))
             for checks in (True, False)]  # fmt: skip
    assert found[0] == found[1]


def test_the_compared_documents_are_the_extremes_and_some_between_within_a_share_of_the_tokens():
    assert first_batch._choose([0, 3, 9, 2, 5, 0], [10] * 6) == [2, 1]
    assert first_batch._choose([0, 7], [1, 8]) == [1] and first_batch._choose([0, 0], [1, 1]) == [0]
    many = first_batch._choose(range(40), range(1, 41))
    assert len(set(many)) == len(many) == 8 and {1, 39} < set(many)
    # Rounding is measured on the first ones: short, but with eight trained tokens.
    assert many[:3] == sorted(many[:3]) and min(many[:3]) >= 8 > min(many)
    even = first_batch._choose([30] * 20, [30] * 20)
    assert len(even) == 8 and sum([30] * len(even)) <= 0.4 * 600


def test_every_rank_runs_as_many_forwards_and_a_batch_that_says_nothing_proves_nothing(tmp_path, monkeypatch):
    """Ranks that hold parts of a model wait for each other in each of its forwards."""
    trainer = packed_trainer(arguments(out=tmp_path))
    for lengths in ([30, 9, 12], [12] * 30):
        batch = DataCollatorForPacking()([{"input_ids": list(range(1, n + 1))} for n in lengths])
        calls = watched(monkeypatch, first_batch, "_alone")
        check_batch(trainer.model, batch)
        few = len(calls)
        monkeypatch.setattr(first_batch.distributed, "is_initialized", lambda: True)
        check_batch(trainer.model, batch)
        assert len(calls) - few == 11 >= few
        monkeypatch.undo()
    ids = torch.arange(3, 12)[None]
    assert check_batch(trainer.model, {"input_ids": ids, "labels": ids}) == []
    batch = trainer.data_collator([{"input_ids": [3, 4, 5], "labels": [-100] * 3}] * 2)
    assert check_batch(trainer.model, batch) == []


class TooLargeBeyond40(torch.autograd.Function):
    """A backward that is 1.5 times too large for more than 40 positions."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.factor = 1.5 if len(hidden) > 40 else 1.0
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor


def _too_large(monkeypatch, own=ChunkedHead._scores):
    """The check's documents, and the few tokens by which a head is chosen, are right."""
    wrong = lambda self, hidden, *rest: own(self, TooLargeBeyond40.apply(hidden), *rest)  # noqa: E731
    monkeypatch.setattr(ChunkedHead, "_scores", wrong)


def _half_of_weights(monkeypatch, backward=LogProbs.backward):
    def halved(ctx, grad, *rest):
        hidden, weight, *others = backward(ctx, grad, *rest)
        return hidden, None if weight is None else weight / 2, *others

    monkeypatch.setattr(LogProbs, "backward", staticmethod(halved))


ALL_TRAIN = {"use_peft": False}
EXACT_BUT_FOR_THE_HEAD = "the LM head that trains is not exact on the first"


@pytest.mark.parametrize(("put", "options", "said"), [
    (_too_large, {}, EXACT_BUT_FOR_THE_HEAD),
    (_too_large, ALL_TRAIN, EXACT_BUT_FOR_THE_HEAD),
    pytest.param(_too_large, {"bf16": True}, EXACT_BUT_FOR_THE_HEAD, marks=pytest.mark.slow),
    (_half_of_weights, ALL_TRAIN, "the gradient of its weights"),
], ids=["too large", "too large, all train", "too large, bf16", "weights"])  # fmt: skip
def test_a_head_whose_backward_is_wrong_stops_the_training(put, options, said, tmp_path, monkeypatch):
    put(monkeypatch)
    adapter = {"peft_config": None} if options is ALL_TRAIN else {}
    trainer = packed_trainer(arguments(out=tmp_path, **options), model=tiny.model(layers=2), **adapter)
    with pytest.raises(ContaminationError, match=said):
        trainer.train()
    assert trainer.check_report.is_exact, "the control: the check before saw nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_that_casts_its_logits_up_is_held_to_the_dtype_of_its_products(dtype, tmp_path):
    """Dory's was held to float32 under accelerate's autocast, and refused."""
    args = arguments(out=tmp_path, use_peft=False, bf16=dtype == "bfloat16")
    report = trained(packed_trainer(args, model=small_model("dory"), peft_config=None)).check_report
    assert report["head"].holds and report["head"].allowed == TOLERANCES[getattr(torch, dtype)].gradients


@pytest.mark.parametrize("name", ["opt", *in_full("bart", "trocr")])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_head_of_a_model_that_calls_its_decoder_past_its_backbone_is_compared(name, factor, tmp_path, monkeypatch):
    """The own forward of these calls `model.decoder`, the trained head `model`."""
    own = ChunkedHead._scores
    scaled = lambda self, hidden, *rest: own(self, hidden * factor, *rest)  # noqa: E731
    trainer = packed_trainer(arguments(out=tmp_path, use_peft=False), model=small_model(name), peft_config=None)
    monkeypatch.setattr(ChunkedHead, "_scores", scaled)  # after the head was chosen
    if factor == 1.0:
        report = trained(trainer).check_report
        assert report["head"].holds and report["head"].allowed > 0
    else:
        with pytest.raises(ContaminationError, match="the LM head that trains is not exact on the first"):
            trainer.train()
