"""The arithmetic bound of a step: the matrix products that it needs, at their shapes' speed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..api import unpatch
from ..errors import InvalidConfig
from ..kernels.lm_head.chunks import positions_per_chunk
from ..runtime.zero3 import whole_shape
from ..training.flops import attention_heads, compute_dtype

# Tokens of the forward that shows which products there are.
_PROBED = 8
# Elements of the scores that are computed at a time.
_LARGEST = 16 * 1024**2


class Product(NamedTuple):
    """`calls` times `copies` of `(rows, inner) @ (inner, columns)`; `transposed`: which operands lie the other way."""

    calls: int
    copies: int
    rows: int
    inner: int
    columns: int
    transposed: str = ""

    @property
    def flops(self) -> int:
        """Floating point operations of all of it."""
        return 2 * self.calls * self.copies * self.rows * self.inner * self.columns


class Linear(NamedTuple):
    """A layer as it multiplies.

    Args:
        inputs, outputs (`int`): its features.
        share (`float`): of the tokens that it sees.
        is_head (`bool`): it sees trained positions only.
        of_input, of_weight (`bool`): which gradients it has in the backward.
    """

    inputs: int
    outputs: int
    share: float
    is_head: bool
    of_input: bool
    of_weight: bool

    def products(self, tokens: int, trained: int, dtype: torch.dtype) -> Iterator[Product]:
        """Forward, the gradient of the input, that of the weight."""
        count = trained if self.is_head else round(tokens * self.share)
        # The LM head takes some positions at a time: all their logits would not fit.
        rows = min(count, positions_per_chunk(dtype, self.outputs)) if self.is_head else count
        if not rows:
            return
        calls = -(-count // rows)
        rows = -(-count // calls)
        yield Product(calls, 1, rows, self.inputs, self.outputs, transposed="right")
        if self.of_input:
            yield Product(calls, 1, rows, self.outputs, self.inputs)
        if self.of_weight:
            yield Product(calls, 1, self.outputs, rows, self.inputs, transposed="left")


def linears(model: Any) -> list[Linear]:
    """How the layers of a model multiply, found by a forward of its own code.

    Args:
        model (`torch.nn.Module`):
            A causal LM, bare or with an adapter, on its device, not patched.

    Raises:
        [`InvalidConfig`]: if it multiplies with weights that are not a `torch.nn.Linear`'s (stacked experts, say).
    """
    _refuse_others(model)
    head, found = model.get_output_embeddings(), []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        layer: Any = module
        share = args[0].numel() / layer.in_features / _PROBED
        gradients = bool(args[0].requires_grad), bool(layer.weight.requires_grad)
        found.append(Linear(layer.in_features, layer.out_features, share, layer is head, *gradients))

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(note) for module in layers]
    try:
        model(torch.arange(1, _PROBED + 1, device=model.get_input_embeddings().weight.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _refuse_others(model: nn.Module) -> None:
    known = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    other = [name for name, p in model.named_parameters() if len(whole_shape(p)) > 1 and id(p) not in known]
    if other:
        raise InvalidConfig(
            f"the arithmetic bound does not know how '{other[0]}' multiplies: it is no torch.nn.Linear's weight.",
            do="Leave the bound out of --strategies.",
        )


def needed_products(
    layers: Sequence[Linear], config: Any, *, lengths: Sequence[int], trained: int, dtype: torch.dtype
) -> list[Product]:
    """The products of a micro-batch.

    Args:
        layers (`Sequence[Linear]`): of [`linears`].
        config (`PreTrainedConfig`): of the model's text part.
        lengths (`Sequence[int]`): tokens of each document.
        trained (`int`): trained positions.
        dtype (`torch.dtype`): what they run in.
    """
    tokens = sum(lengths)
    found = [product for layer in layers for product in layer.products(tokens, trained, dtype)]
    heads, head_dim = attention_heads(config)
    if heads and tokens:
        seen = round(sum(n * n for n in lengths) / tokens)
        found += [
            p._replace(calls=p.calls * config.num_hidden_layers) for p in _attention(heads, head_dim, seen, tokens)
        ]
    return found


def _attention(heads: int, head_dim: int, seen: int, tokens: int) -> Iterator[Product]:
    """Scores and values, forward and backward, of the half that is not masked: so of half the heads."""
    rows = max(tokens * heads // 2, 1)
    copies = -(-rows // min(seen, max(_LARGEST // seen, 1)))
    calls = -(-copies * min(seen, rows) * seen // _LARGEST)
    together = -(-copies // calls)
    rows = max(round(rows / (calls * together)), 1)
    # Scores, and the gradient of the probabilities; values, and the gradient of queries; those of keys and values.
    yield Product(calls * 2, together, rows, head_dim, seen, "right")
    yield Product(calls * 2, together, rows, seen, head_dim)
    yield Product(calls * 2, together, rows, seen, head_dim, "left")


class ProductsOnly:
    """Runs the products of a micro-batch in place of its training.

    Args:
        trainer (`PackedSFTTrainer`): its model is no longer patched afterwards, and not trained.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._layers, self._room = trainer, None, [torch.empty(0)] * 3

    def __call__(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """A training step whose loss is zero."""
        args, bare = self._trainer.args, self._trainer.model
        dtype = compute_dtype(args)
        if self._layers is None:
            unpatch(bare)
            self._layers = linears(bare)
        products = needed_products(
            self._layers,
            bare.config.get_text_config(),
            lengths=inputs["packed_layout"].lengths,
            trained=int((inputs["labels"] != -100).sum()),
            dtype=dtype,
        )
        for product in products:
            self._multiply(product, dtype, args.device)
        return torch.zeros((), device=args.device)

    @torch.no_grad()
    def _multiply(self, product: Product, dtype: torch.dtype, device: torch.device) -> None:
        calls, copies, rows, inner, columns, transposed = product
        shapes = [(copies, rows, inner), (copies, inner, columns), (copies, rows, columns)]
        flips = ["left" in transposed, "right" in transposed, False]
        left, right, out = (self._operand(*each, dtype, device) for each in zip(range(3), shapes, flips, strict=True))
        for _ in range(calls):
            if copies == 1:
                torch.mm(left[0], right[0], out=out[0])
            else:
                torch.bmm(left, right, out=out)

    def _operand(
        self, place: int, shape: tuple[int, int, int], flip: bool, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Random numbers, or room for results, in memory that is made once."""
        copies, rows, columns = shape
        size = copies * rows * columns
        if self._room[place].numel() < size:
            self._room[place] = torch.randn(size, dtype=dtype, device=device)
        room = self._room[place][:size]
        return room.view(copies, columns, rows).mT if flip else room.view(shape)
