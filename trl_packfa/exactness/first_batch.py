"""Compare the first training batch, packed, with its documents alone.

It uses the training's own data, collator, template, adapter and kernel. The check before used documents of its own.

Shape letters: B rows, L row length, n tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from ..errors import ContaminationError
from ..layout import PackedLayout
from ..layout.from_call import layout_of
from ..layout.shard import RowShard
from ..patching import router_loss
from ..patching.inspect import inner_model
from ..patching.rotary import depends_on_length
from ..runtime.compile import uncompiled
from ..runtime.per_document import BOUNDARIES
from ..runtime.sequence_parallel import ShardedRowModel, shard_batch
from .compare import NOISE_FACTOR, nan_as_inf
from .head import HeadProof, check_head, outputs_of
from .products import fast_half_products
from .quiet import quiet
from .rounding import last_places_off
from .subject import rounding_dtype

# Every rank compares the same number of documents: ranks that hold parts of a model run its forwards together.
# Rounding is measured on the first few documents.
_DOCUMENTS, _ROUNDED = 8, 3
# A document with fewer trained tokens has no meaningful median.
_FEW = 8
# Smaller differences of log-probabilities, in nats, do not matter: two last places of a logit of eight.
FLOOR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1.6e-2, torch.bfloat16: 1.25e-1}


class BatchProof(NamedTuple):
    """Difference between the trained tokens' log-probabilities, packed, and those of the documents alone.

    Attributes:
        difference (`float`), allowed (`float`): in nats, of the median token of the worst document.
        tokens (`int`): length of that document, 0 if all documents were taken together.
        head ([`HeadProof`] or `None`): proof of the LM head that trains, on the whole batch.
    """

    difference: float
    allowed: float
    tokens: int
    head: HeadProof | None = None

    def require_exact(self) -> None:
        """Raise [`ContaminationError`] with the numbers if the first batch is not exact."""
        if self.difference <= self.allowed:
            if self.head is not None:
                self.head.require_exact()
            return
        which = f"a document of {self.tokens} tokens" if self.tokens else "its documents"
        raise ContaminationError(
            f"packing is not exact on the first training batch: the log-probabilities of {which} are off by "
            f"{self.difference:.2e} nats for the median token (allowed {self.allowed:.2e}).",
            why=["the earlier check, on documents cut out of the data, found packing exact: so something in these "
                 "documents, or in the collator's arguments for them, acts across boundaries"],
            do="Train padded with packing=False, and please report it. check_packing=False trains without this proof.",
        )  # fmt: skip


@torch.no_grad()
def check_batch(
    model: nn.Module, batch: Mapping[str, Any], group: distributed.ProcessGroup | distributed.DeviceMesh | None = None
) -> BatchProof | None:
    """Compare a packed training batch with some of its documents, each alone; `None` if it trains no token.

    It runs the batch forward once, eight of its documents alone, and three of these with random rounding. The LM head
    runs forward and backward ([`~head.check_head`]). The patched `model` must accept `fused_lm_head=True`. If the
    processes of a `group` share the row, each runs as many tokens alone as it holds of it.
    """
    layout = batch.get("packed_layout") or layout_of(dict(batch))
    if layout is None:
        return None
    most = layout.max_seqlen if group is None else max(layout.num_tokens // RowShard.of(group).size, 2)
    if any(depends_on_length(module) for module in model.modules()):
        most = layout.max_seqlen  # the beginning of a document is not the document's beginning in these models
    # The first label does not count, as no token precedes it.
    trained = [document[:most] != -100 for document in layout.split(batch["labels"])]
    chosen = _choose([int(mask[1:].sum()) for mask in trained])
    batch = {name: value for name, value in batch.items() if name != "loss"}
    called: Any = model if group is None else ShardedRowModel(model, group)
    with quiet(model, training=True), uncompiled(model), fast_half_products(model):
        with outputs_of(inner_model(model).base_model) as outputs:
            packed = log_probs_of(model, batch, called)
        part = batch if group is None else shard_batch(batch, group)
        head = check_head(model, part, outputs[0]) if outputs else None
        # TRL's log-probabilities `(B, L - 1)` begin with the second token. One column is added in front, so that place
        # i is token i.
        pieces = layout.split(nn.functional.pad(packed, (1, 0)))
        alone = [_alone(model, batch, layout, i, most) for i in chosen]
        with last_places_off(model):
            rounded = [_alone(model, batch, layout, i, most) for i in chosen[:_ROUNDED]]
    # Repeated documents only keep ranks in step. They come last, and would outweigh the others in the median.
    chosen = list(dict.fromkeys(chosen))
    alone, rounded = alone[: len(chosen)], rounded[: len(chosen)]
    masks = [trained[i][1:].to(own.device) for i, own in zip(chosen, alone, strict=True)]
    found = [(pieces[i][1:most] - own)[mask].abs().float() for i, own, mask in zip(chosen, alone, masks, strict=True)]
    noise = [(off - own)[mask].abs().float() for off, own, mask in zip(rounded, alone, masks, strict=False)]
    proof = _worst(found, noise, [layout.lengths[i] for i in chosen], FLOOR[rounding_dtype(model)])
    return proof and proof._replace(head=head)


def _choose(trained: Sequence[int]) -> list[int]:
    """Choose the longest document that trains, the first, last and shortest, and some between; repeated if too few."""
    training = [i for i, count in enumerate(trained) if count] or [0]
    by_length = sorted(training, key=lambda i: trained[i])
    apart = [training[i * len(training) // _DOCUMENTS] for i in range(_DOCUMENTS)]
    chosen = dict.fromkeys([by_length[-1], training[0], training[-1], by_length[0], *apart, *training])
    return [*chosen, *[training[0]] * _DOCUMENTS][:_DOCUMENTS]


def _alone(model: nn.Module, batch: Mapping[str, Any], layout: PackedLayout, document: int, most: int) -> torch.Tensor:
    """Return the log-probabilities `(n - 1,)` of the labels of a document, or of its first `most` tokens, alone."""
    start = sum(layout.lengths[:document])
    stop = start + min(layout.lengths[document], most)
    call = {
        name: value.flatten(0, 1)[start:stop][None]
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] == batch["input_ids"].shape[:2]
    }
    # Without positions the model counts them from 0, as in padded training.
    call = {name: value for name, value in call.items() if name not in (*BOUNDARIES, "position_ids")}
    return log_probs_of(model, call, model)[0]


def log_probs_of(model: nn.Module, call: Mapping[str, Any], called: Callable[..., Any]) -> torch.Tensor:
    """Return the log-probabilities `(B, L - 1)` of a call of `called`, a way to run the model; 0 if untrained."""
    options = router_loss.without(inner_model(model).config.get_text_config())  # TRL's computation fails on some types
    # The same call as in TRL's training. Logits `(B, L, V)` of a whole batch may not fit into memory.
    return called(**call, fused_lm_head=True, use_cache=False, **options).log_probs


def _worst(
    found: Sequence[torch.Tensor], noise: Sequence[torch.Tensor], lengths: Sequence[int], floor: float
) -> BatchProof | None:
    """Return the proof with the largest share of its limit: of a document's median token, or of all tokens together.

    A document without a measured noise uses the usual noise.
    """
    together, usual_noise = torch.cat(list(found)), torch.cat(list(noise))
    if not len(together):
        return None
    usual = float(usual_noise.median()) if len(usual_noise) else 0.0
    own = [float(each.median()) if len(each) else usual for each in noise] + [usual] * (len(found) - len(noise))
    proofs = []
    for difference, rounding, tokens in [(together, usual, 0), *zip(found, own, lengths, strict=True)]:
        # Short documents still count in the tokens of all documents together.
        if tokens and len(difference) < _FEW:
            continue
        middle = float(difference.median())
        allowed = max(NOISE_FACTOR * max(rounding, usual), floor)
        proofs.append(BatchProof(nan_as_inf(middle), allowed, tokens))
    return max(proofs, key=lambda proof: proof.difference / proof.allowed)
