"""Compare the first training batch, packed, with its documents alone, and the LM head that trains with the model's.

The check before used documents of its own, and took gradients from the head's input on. This one uses the training's
data, collator, template, adapter and kernel, and the code that scores labels in training, ours or TRL's. A head treats
every token by itself, so log-probability and gradient of a few positions are compared; and the gradient of the head's
weights, a sum over all positions, if they train.

Of a padded batch that runs without its pads some rows are compared with each of them alone, inside that call,
whichever code makes it.

Shape letters: B rows, L row length, n tokens of a document or row, P trained positions, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..comparison import TOLERANCES, Comparison, nearest
from ..compile import uncompiled
from ..layout import PackedLayout
from ..layout.call_context import BOUNDARIES
from ..layout.from_call import layout_of
from ..layout.padded_rows import PaddedRows
from ..layout.shard import RowShard
from ..override import set_inside
from ..parallel.sequence_parallel import ShardedRowModel, shard_batch
from ..parallel.zero3 import is_engine, is_in_parts, is_partitioned
from ..patching import cross_attention, router_loss
from ..patching.handed_masks import handed_masks
from ..patching.inspect import inner_model
from ..patching.rotary import depends_on_length
from ..patching.state import find_state, unpadding_of
from ..patching.unpadding import states_of
from .compare import nan_as_inf, relative_difference
from .modes import without_random_numbers
from .rounding import last_places_off
from .scoring import Scorer
from .subject import compute_dtype, rounding_dtype

# Every rank compares the same number of documents, because ranks that hold parts of a model run its forwards together;
# if it has fewer, it runs the first tokens of one again. They hold no more than a share of the batch's tokens, unless
# one alone does, so that the comparison costs less than a step. Rounding is measured on a few of them.
_DOCUMENTS, _ROUNDED, _SHARE, _AGAIN = 8, 3, 0.4, 2
# Number of positions at which the head is compared, and number of positions whose logits are in memory at a time.
_SAMPLES, _CHUNK = 16, 64
# A document with fewer trained tokens, or a row with fewer tokens, has no meaningful median.
_FEW = 8


@torch.no_grad()
def check_batch(
    model: nn.Module, batch: Mapping[str, Any], group: distributed.ProcessGroup | distributed.DeviceMesh | None = None
) -> list[Comparison]:
    """Compare a packed training batch with some of its documents, each alone, and the LM head that trains.

    Without a trained token nothing is compared.

    It runs the batch forward once, eight documents or 40 % of its tokens alone, and three short ones of these with
    random rounding. The LM head runs forward and backward ([`_check_head`]). The patched `model` must accept
    `fused_lm_head=True`. If the processes of a `group` share the row, each runs alone as many tokens as it holds.

    Of a padded batch that runs without its pads some rows are compared, see [`check_padded_call`].
    """
    layout = batch.get("packed_layout") or layout_of(dict(batch))
    if layout is None:
        return _check_padded(model, batch)
    most = layout.max_seqlen if group is None else max(layout.num_tokens // RowShard.of(group).size, 2)
    if any(depends_on_length(module) for module in model.modules()):
        most = layout.max_seqlen  # the beginning of a document is not the document's beginning in these models
    # The first label does not count, as no token precedes it.
    trained = [document[:most] != -100 for document in layout.split(batch["labels"])]
    chosen = _choose([int(mask[1:].sum()) for mask in trained], [min(n, most) for n in layout.lengths])
    batch = {name: value for name, value in batch.items() if name != "loss"}
    called: Any = model if group is None else ShardedRowModel(model, group)
    with without_random_numbers(model, training=True), uncompiled(model):
        with _outputs_of_models(model) as outputs:
            packed = trained_outputs(model, batch, called).log_probs
        part = batch if group is None else shard_batch(batch, group)
        head = _check_head(model, part, outputs)
        # TRL's log-probabilities `(B, L - 1)` begin with the second token. One column is added in front, so that place
        # i is token i.
        pieces = layout.split(nn.functional.pad(packed, (1, 0)))
        alone = [_alone(model, batch, layout, i, most) for i in chosen]
        with last_places_off(model):
            few = min(_ROUNDED, -(-len(chosen) // 2))
            rounded = [_alone(model, batch, layout, i, most) for i in chosen[:few]]
        if distributed.is_initialized():
            for _ in range(_DOCUMENTS + _ROUNDED - len(alone) - len(rounded)):
                _alone(model, batch, layout, chosen[0], _AGAIN)
    masks = [trained[i][1:].to(own.device) for i, own in zip(chosen, alone, strict=True)]
    found = [(pieces[i][1:most] - own)[mask].abs().float() for i, own, mask in zip(chosen, alone, masks, strict=True)]
    noise = [(off - own)[mask].abs().float() for off, own, mask in zip(rounded, alone, masks, strict=False)]
    floor = TOLERANCES[rounding_dtype(model)].log_probs
    documents = _worst(found, noise, [layout.lengths[i] for i in chosen], floor)
    return [own for own in (documents, head) if own is not None] if documents is not None else []


def _check_padded(model: nn.Module, batch: Mapping[str, Any]) -> list[Comparison]:
    """Compare the first call without pads that a padded batch makes; it makes none if its pads are computed."""
    patched = inner_model(model)
    found: list[Comparison | None] = []

    def watch(forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any) -> None:
        if not found:
            found.append(check_padded_call(patched, forward, call, rows))

    if (unpadding := unpadding_of(patched)) is None:
        return []
    with without_random_numbers(model, training=True), uncompiled(model), set_inside(unpadding, watch=watch):
        trained_outputs(model, batch, model)
    return [comparison._replace(where=type(patched).__name__) for comparison in found if comparison is not None]


def check_padded_call(
    model: nn.Module, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows
) -> Comparison | None:
    """Compare a patched model's call without padding, from inside it; see [`compare_padded_batch`].

    Return `None` if the backbone cannot run again there: with sharded weights, which are gathered once per call, and
    with activated LoRA, which finds its invocation tokens outside of the backbone.
    """
    state = find_state(model)
    assert state is not None and state.unpadding is not None
    sharded = any(hasattr(p, "device_mesh") for p in inner_model(model).parameters())
    if sharded or is_partitioned(model) or state.invocations:
        return None
    # The model is called again, which is neither counted nor watched.
    with set_inside(state.unpadding, **{**vars(state.unpadding), "watch": None}):
        return compare_padded_batch(state.parts.stack, forward, call, rows)


@torch.no_grad()
def compare_padded_batch(
    backbone: nn.Module, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows
) -> Comparison:
    """Run a padded call again without padding and without dropout, and compare some of its rows with the rows alone.

    `forward` is the unpatched forward of this patched backbone.
    """
    chosen = _choose_rows(rows)
    with without_random_numbers(backbone, training=True):
        # Not the module, whose hooks belong to the run: one may keep only the labelled positions for the LM head.
        together = states_of(backbone.forward(**call))
        alone = [_row_alone(forward, call, rows, i) for i in chosen]
        with last_places_off(backbone):
            rounded = [_row_alone(forward, call, rows, i) for i in chosen]
    least, found = TOLERANCES[compute_dtype(backbone, together.dtype)].outputs, []
    for i, own, off in zip(chosen, alone, rounded, strict=True):
        start, length = rows.starts[i], rows.lengths[i]
        found_together = together[i, start : start + length]
        # Compare the tokens after a shared prefix separately too, because they may be few of a row's tokens.
        for last in {length, max(rows.own_tokens(i), min(length, _FEW))}:
            difference, noise = (
                relative_difference(states[-last:], own[-last:], typical=True) for states in (found_together, off)
            )
            which = f"a row of {length} tokens"
            found.append(Comparison.beside_rounding("padded batch", difference, noise, least, of=which))
    return nearest(found)


def _choose_rows(rows: PaddedRows) -> list[int]:
    """Choose the first, last, longest and shortest row: four on every rank, because ranks run forwards together."""
    real = [i for i, length in enumerate(rows.lengths) if length]
    by_length = sorted(real, key=lambda i: rows.lengths[i])
    return [real[0], real[-1], by_length[-1], by_length[0]]


def _row_alone(forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, row: int) -> torch.Tensor:
    """Run one row alone; return its hidden states `(n, D)`."""
    own = {**rows.row_of_call(call, row), **cross_attention.row_of_call(call, rows, row)}
    if (masks := handed_masks(call.get("attention_mask"))) is not None:
        own["attention_mask"] = masks.of_row(rows, row)
    return states_of(forward(**own))[0]


def _choose(trained: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Choose the document that trains most, the first, last and least trained, and some between, within the share.

    The shortest ones with a meaningful median come first.
    """
    training = [i for i, count in enumerate(trained) if count] or [0]
    by_count = sorted(training, key=lambda i: trained[i])
    spread = [training[i * len(training) // _DOCUMENTS] for i in range(_DOCUMENTS)]
    chosen: list[int] = []
    left = _SHARE * sum(lengths)
    for i in dict.fromkeys([by_count[-1], training[0], training[-1], by_count[0], *spread, *training]):
        if len(chosen) < _DOCUMENTS and (not chosen or lengths[i] <= left):
            chosen.append(i)
            left -= lengths[i]
    rounded = sorted(chosen, key=lambda i: (trained[i] < _FEW, lengths[i]))[:_ROUNDED]
    return list(dict.fromkeys([*rounded, *chosen]))


def _alone(model: nn.Module, batch: Mapping[str, Any], layout: PackedLayout, document: int, most: int) -> torch.Tensor:
    """Return the log-probabilities `(n - 1,)` of the labels of a document, or of its first `most` tokens, alone."""
    shape = (layout.rows, layout.row_length)
    call = {
        name: layout.split(value)[document][None, :most]
        for name, value in batch.items()
        # Without positions the model counts them from 0, as in padded training.
        if name not in (*BOUNDARIES, "position_ids") and isinstance(value, torch.Tensor) and value.shape[:2] == shape
    }
    return trained_outputs(model, call, model).log_probs[0]


def trained_outputs(model: nn.Module, call: Mapping[str, Any], called: Callable[..., Any]) -> Any:
    """Return the outputs of a call of `called`, a way to run the model, as in TRL's training.

    Their `log_probs` `(B, L - 1)` are 0 at untrained labels. Logits `(B, L, V)` of a batch may not fit into memory.
    """
    options = router_loss.without(inner_model(model).config.get_text_config())  # TRL's computation fails on some types
    return called(**call, fused_lm_head=True, use_cache=False, **options)


def _worst(
    found: Sequence[torch.Tensor], noise: Sequence[torch.Tensor], lengths: Sequence[int], floor: float
) -> Comparison | None:
    """Return the comparison nearest to its limit, or beyond it: of a document's median token, or of all together."""
    together, usual_noise = torch.cat(list(found)), torch.cat(list(noise))
    if not len(together):
        return None
    usual = float(usual_noise.median()) if len(usual_noise) else 0.0
    # A document without a measured noise uses the usual noise.
    own = [float(each.median()) if len(each) else usual for each in noise] + [usual] * (len(found) - len(noise))
    cases = [(together, usual, "its documents")]
    # Short documents still count in the tokens of all documents together.
    cases += [
        (off, max(rounding, usual), f"a document of {tokens} tokens")
        for off, rounding, tokens in zip(found, own, lengths, strict=True)
        if len(off) >= _FEW
    ]
    return nearest(
        Comparison.beside_rounding("first batch", float(off.median()), rounding, floor, of=which)
        for off, rounding, which in cases
    )


def _check_head(model: nn.Module, batch: Mapping[str, Any], outputs: Mapping[nn.Module, Any]) -> Comparison | None:
    """Compare the head that trains with the model's own logits.

    It returns `None` if they cannot be compared: the head's weights are split over ranks, or it is not a module. The
    model must accept `fused_lm_head=True`. `outputs` are those of the transformers models in it, for this batch.
    """
    if isinstance(model, DistributedDataParallel) or is_engine(model):
        # Their forward prepares for one backward over all parameters, which is that of the training step.
        model = cast(nn.Module, model.module)
    inner = inner_model(model)
    scorer, states = Scorer(model), getattr(outputs.get(inner.base_model), "last_hidden_state", None)
    weights = [] if scorer.head is None else list(scorer.head.parameters())
    if inner.base_model is inner or states is None or not weights:
        return None
    # FSDP2's weights are whole tensors between a forward and the next one, so its modules are asked, too.
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if sharded or any(isinstance(weight, DTensor) or is_in_parts(weight) for weight in weights):
        return None
    labels = batch.get("shift_labels")  # at the token that predicts them
    if labels is None:
        labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    trained = (labels.flatten() != -100).nonzero()[:, 0]
    if not len(trained):
        return None
    leaf = states.detach().requires_grad_(True)
    params = [leaf, *(weight for weight in weights if weight.requires_grad)]
    assert scorer.head is not None
    dtypes: set[torch.dtype] = set()

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        # Inside the head accelerate's autocast is on. Its output may be cast up, by the head itself too.
        dtypes.add(rounding_dtype(model, output.dtype))

    with torch.enable_grad(), _returning(leaf, states, outputs), scorer.head.register_forward_hook(note):
        found = trained_outputs(model, batch, model)
        by_head = _gradients(found.loss, params)
        samples = trained[torch.linspace(0, len(trained) - 1, _SAMPLES, device=trained.device).long().unique()]
        # The gradient of the weights is a sum over all positions. If they do not train, a few positions are enough.
        parts = trained.split(_CHUNK) if len(params) > 1 else [samples]
        call = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        expected: list[torch.Tensor] = [torch.zeros_like(param, dtype=torch.float32) for param in params]
        log_probs = torch.empty(labels.numel(), device=labels.device)
        for part in parts:
            logits = scorer(call, (labels.shape[0], labels.shape[1]), part).logits
            if scorer.head is None or logits is None:
                return None
            own = torch.log_softmax(logits.float(), -1).gather(-1, labels.flatten()[part, None])[:, 0]
            for total, gradient in zip(expected, _gradients(-own.sum() / len(trained), params), strict=True):
                total += gradient
            log_probs[part] = own.detach()
    scored = nn.functional.pad(found.log_probs.detach(), (0, labels.shape[1] - found.log_probs.shape[1])).flatten()
    at_samples = [gradient.flatten(0, 1)[samples] for gradient in (by_head[0], expected[0])]
    loss = float(found.loss)
    differences = {
        "the gradient of the hidden states": relative_difference(*at_samples),
        "the gradient of its weights": max(
            (_relative(*pair) for pair in zip(by_head[1:], expected[1:], strict=True)), default=0.0
        ),
        "the log-probability": _relative(scored[samples], log_probs[samples]),
        "the loss": nan_as_inf(abs(loss + float(scored[trained].mean())) / max(abs(loss), 1.0)),
    }
    what = max(differences, key=lambda name: differences[name])
    allowed = max(TOLERANCES[dtype].gradients for dtype in dtypes)
    return Comparison("head", differences[what], allowed, of=f"{what} of {len(trained)} trained positions")


@contextmanager
def _returning(leaf: torch.Tensor, states: torch.Tensor, outputs: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Let every model inside whose last states were `states` return `leaf` in a `with` block.

    The trained head calls the backbone. The own forward of some causal LMs (BART, OPT) calls the decoder in it.
    """

    def forward(output: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: type(output)(**{**output, "last_hidden_state": leaf})

    with ExitStack() as stack:
        for module, output in outputs.items():
            if getattr(output, "last_hidden_state", None) is states:
                stack.enter_context(set_inside(module, forward=forward(output)))
        yield


@contextmanager
def _outputs_of_models(model: nn.Module) -> Iterator[dict[nn.Module, Any]]:
    """Keep the last output of each transformers model inside `model` in a `with` block."""
    outputs: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = output

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                stack.enter_context(module.register_forward_hook(keep))
        yield outputs


def _gradients(loss: torch.Tensor, params: list[torch.Tensor]) -> list[torch.Tensor]:
    # `torch.autograd.grad` adds nothing to a parameter's `.grad` and calls no hook of a wrapper.
    with torch.autocast(loss.device.type, enabled=False):
        return [gradient.float() for gradient in torch.autograd.grad(loss, params)]


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_difference(actual[None], expected[None])  # all numbers together are one vector
