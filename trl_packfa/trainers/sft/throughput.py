"""A run as it goes: its speed and model FLOPs utilization (MFU), its losses, and advice when memory runs out.

Nothing here waits for the device outside of logging steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...config.sft import PackedSFTConfig
from ...data.flops import ModelFlops, compute_dtype, matmul_flops
from ...errors import NonFiniteLoss, figure, is_out_of_memory
from .datasheet import datasheet_flops

# Seconds for measuring the device's peak, once per run.
_MEASURING = 0.05

# Documents, and tokens of each, that a refused loss shows; and micro-batches without a log that are remembered.
_SHOWN = 8
_REMEMBERED = 1024
# Share of the reserved memory in no tensor that is worth a word; settings of the allocator, the first for every torch.
_FRAGMENTS, _ALLOCATOR = 0.1, ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Rows of the measured product, like the tokens of a full micro-batch. A GPU needs more rows than a CPU to be busy.
_ROWS, _ROWS_ON_GPU = 2048, 8192


class SpeedMeter:
    """A counter of the tokens that one rank trains between two logs. Only `read` waits for the device.

    The model is not wrapped by an engine. MFU is a share of the peak speed, see [`peak_flops`]; each of `world_size`
    ranks has its own device.
    """

    def __init__(self, model: Any, args: PackedSFTConfig, *, world_size: int) -> None:
        self._flops, self._config = ModelFlops.of(model), model.config
        self._args, self._world_size = args, world_size
        self._peak: float | None = None
        self.start(0)

    def start(self, tokens: int) -> None:
        """Begin to count; `tokens` is the number that all ranks have trained so far."""
        self._before = tokens
        # They become tensors if a padded batch's mask has to be counted on its device.
        self._tokens, self._squares, self._trained = [0, 0, 0]
        self._squares_of_trees = 0

    @figure("count of tokens")
    def add(self, inputs: dict[str, Any]) -> None:
        """Count a micro-batch: its documents' tokens, the squares of their lengths, and the trained tokens."""
        layout, labels = inputs.get("packed_layout"), inputs["labels"]
        if layout is not None:
            # Use the lengths on the host, because reading a tensor would wait for the device.
            lengths = layout.true_lengths
            tokens: Any = sum(lengths)
            squares: Any = sum(length * length for length in lengths)
            self._squares_of_trees += squares if layout.prefix_tree is None else layout.prefix_tree.squares
        else:
            lengths = (
                inputs["attention_mask"].sum(-1)
                if "attention_mask" in inputs
                else labels.new_full((len(labels),), labels.shape[-1])
            )
            tokens, squares = lengths.sum(), (lengths**2).sum()
        self._tokens, self._squares = self._tokens + tokens, self._squares + squares
        self._trained = self._trained + (labels[..., 1:] != -100).sum()  # the first token is never predicted

    def read(self, tokens: int, seconds: float, shared: float) -> dict[str, float]:
        """Return `tokens_per_second` of all ranks and `mfu` since the last call; an empty dict if nothing was trained.

        `tokens` is the number that all ranks have trained so far, `seconds` the time since the last call, `shared` the
        tokens of this rank in it that were not computed, because a prefix runs once for several documents.
        A model whose operations cannot be counted has no `mfu`. With shared prefixes, `prefixes_shared` is the share
        of this rank's tokens that were not computed. The cost of attention is estimated from this rank's documents.
        """
        counted, figures = float(self._tokens), dict[str, float]()
        if tokens > self._before and counted and seconds:
            rate = (tokens - self._before) / seconds
            # Mean over tokens of their document's length. Lengths 1 and 3 give (1 + 9) / 4 = 2.5, not 2.
            computed, squares = counted - shared, self._squares_of_trees if shared else self._squares
            figures = {"tokens_per_second": rate}
            if self._flops is not None and self._peak is None:
                self._peak = peak_flops(self._config, self._args, seconds=_MEASURING)
            if self._flops is not None and self._peak is not None:
                needed = self._flops.per_token(seen=float(squares) / computed, trained=float(self._trained) / computed)
                needed *= computed / counted
                figures["mfu"] = rate * needed / (self._peak * self._world_size)
            if self._args.share_prefixes:
                figures["prefixes_shared"] = shared / counted
        self.start(tokens)
        return figures


@figure("peak rate of this device, and so no MFU")
def peak_flops(config: Any, args: PackedSFTConfig, *, seconds: float = 0.5) -> float:
    """Return the peak operations per second: `peak_tflops`, the data sheet's, or measured on the model's product.

    It is `None` if it cannot be measured, see [`~errors.figure`].
    """
    known = known_peak(args)
    if known is not None:
        return known
    text = config.get_text_config()
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    wide = max(wide) if isinstance(wide, (list, tuple)) else wide
    # The shape of the MLP's first product, usually the largest of a layer.
    rows = _ROWS if args.device.type == "cpu" else _ROWS_ON_GPU
    return matmul_flops(rows, text.hidden_size, wide, dtype=compute_dtype(args), device=args.device, seconds=seconds)


def known_peak(args: PackedSFTConfig) -> float | None:
    """Return the peak operations per second without measuring: `peak_tflops` or the data sheet, else `None`."""
    if args.peak_tflops is not None:
        return args.peak_tflops * 1e12
    return datasheet_flops(args.device, compute_dtype(args))


@contextmanager
def memory_advice(args: PackedSFTConfig, inputs: dict[str, Any], *, budget: int | None) -> Iterator[None]:
    """Add advice to an out-of-memory error in a `with` block: the argument to lower, and its new value."""
    try:
        yield
    # torch's error on accelerators is a subclass of RuntimeError, and its CPU allocator raises a plain RuntimeError.
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error) and (advice := _advice(args, inputs, budget)) is not None:
            error.add_note(advice + _advice_on_fragments())
        raise


def _advice_on_fragments() -> str:
    """Return a sentence if much of the memory that torch has reserved on a GPU is in no tensor, else `""`."""
    if not torch.cuda.is_available():
        return ""
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    grows = any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR)
    if grows or reserved - allocated < _FRAGMENTS * reserved:
        return ""
    return (
        f" And {(reserved - allocated) / 2**30:.1f} of {reserved / 2**30:.1f} GiB that torch has reserved are in no "
        f"tensor, because micro-batches differ in length: set {_ALLOCATOR[0]}=expandable_segments:True."
    )


@figure("advice on memory")
def _advice(args: PackedSFTConfig, inputs: dict[str, Any], budget: int | None) -> str:
    tokens, layout, mask = inputs["input_ids"].numel(), inputs.get("packed_layout"), inputs.get("attention_mask")
    longest = tokens if layout is None else layout.max_seqlen
    if layout is None and mask is not None:  # padded rows
        tokens, longest = int(mask.sum()), int(mask.sum(-1).max())
    held = f"trl-packfa: out of memory with a micro-batch of {tokens} tokens (longest document {longest})."
    # Advise half as many tokens, but not fewer than the longest document, which cannot be cut.
    if budget is not None and tokens > longest:
        # Without a layout the batch has images, and the budget counts their patches as well.
        lower = budget // 2 if layout is None else max(longest, tokens // 2)
        return f"{held} Lower max_tokens_per_microbatch from {budget} to {lower}: each step keeps the same examples."
    batch = args.per_device_train_batch_size
    if batch > 1 and tokens > longest:
        accumulation = args.gradient_accumulation_steps
        return (
            f"{held} Lower per_device_train_batch_size from {batch} to {batch // 2} and raise "
            f"gradient_accumulation_steps from {accumulation} to {math.ceil(accumulation * batch / (batch // 2))}."
        )
    more = "" if args.gradient_checkpointing else ", or set gradient_checkpointing=True"
    return f"{held} The micro-batch is one document: lower max_length to {longest // 2}{more}."


class LossWatch:
    """A record of the micro-batches since the last log: their losses, on the device, and their token ids."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.where: list[tuple[int, dict[str, Any]]] = []

    def add(self, step: int, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        """Remember a micro-batch of this step. Its token ids, which are small, stay in memory until the next log."""
        self.losses.append(loss.detach())
        self.where.append((step, {name: inputs.get(name) for name in ("input_ids", "packed_layout")}))

    @property
    def is_full(self) -> bool:
        """`True` after many micro-batches without a log. Runs that rarely log must not collect losses without end."""
        return len(self.losses) >= _REMEMBERED

    def require_finite(self, tokenizer: Any) -> None:
        """Require that all remembered losses are finite, then forget them. The host waits for the losses here."""
        losses, where = self.losses, self.where
        self.losses, self.where = [], []
        if not losses:
            return
        # Check all at once, with one wait for the device. A wait per micro-batch would slow every step.
        bad = (~torch.isfinite(torch.stack(losses))).nonzero().flatten()
        if not len(bad):
            return
        first = int(bad[0])
        step, inputs = where[first]
        raise NonFiniteLoss(
            f"the loss is {float(losses[first])} at step {step} (transformers would log the mean of the others).",
            why=_documents(inputs, tokenizer) or (),
            do="Look at these documents. Lower the learning rate or max_grad_norm, or train in bfloat16, not float16.",
        )


@figure("text of its documents")
def _documents(inputs: dict[str, Any], tokenizer: Any) -> list[str]:
    """Describe each document of a micro-batch by its length and first tokens."""
    layout, ids = inputs["packed_layout"], inputs["input_ids"]
    documents = list(layout.split(ids)) if layout is not None else list(ids)
    lines = [
        f"document of {len(document)} tokens: {tokenizer.decode(document[:_SHOWN].tolist())!r} ..."
        for document in documents[:_SHOWN]
    ]
    return lines + ([f"and {len(documents) - _SHOWN} more"] if len(documents) > _SHOWN else [])
