"""Measure the arithmetic bound of a step: only its matrix products, at the speed of their shapes.

    python benchmarks/arithmetic_bound.py --model cpu-reference --lengths LENGTHS.json --strategies step-bound,step

It is `trl-packfa bench` with two more strategies, `bfd-bound` and `step-bound`, and with the same arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trl_packfa import unpatch
from trl_packfa.bench.sides import KINDS, Kind
from trl_packfa.cli.main import main
from trl_packfa.data.flops import attention_heads, compute_dtype
from trl_packfa.errors import InvalidConfig
from trl_packfa.kernels.lm_head.chunked import positions_per_chunk
from trl_packfa.packing import BFD, STEP
from trl_packfa.parallel.zero3 import whole_shape

# Number of tokens in the forward that records the products.
_PROBED = 8
# Number of attention scores that are computed at a time.
_LARGEST = 16 * 1024**2


class Product(NamedTuple):
    """`calls` times `copies` of the matrix product `(rows, inner) @ (inner, columns)`.

    `transposed` names the operands that are stored transposed: `"left"` or `"right"`.
    """

    calls: int
    copies: int
    rows: int
    inner: int
    columns: int
    transposed: str = ""

    @property
    def flops(self) -> int:
        """Floating point operations of all calls and copies."""
        return 2 * self.calls * self.copies * self.rows * self.inner * self.columns


class Linear(NamedTuple):
    """Matrix products of one linear layer."""

    inputs: int  # features
    outputs: int
    share: float  # of the tokens that go through the layer
    is_head: bool  # the layer is the LM head, which gets trained positions only
    of_input: bool  # the backward computes the gradient of the input
    of_weight: bool  # and of the weight

    def products(self, tokens: int, trained: int, dtype: torch.dtype) -> Iterator[Product]:
        """Yield the products of the forward, the gradient of the input and the gradient of the weight."""
        count = trained if self.is_head else round(tokens * self.share)
        # The LM head runs in chunks of positions, because all logits together would not fit.
        rows = min(count, positions_per_chunk(dtype, self.outputs, on_cpu=True)) if self.is_head else count
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
    """Find the linear layers of a causal LM that is not patched, and their products, with one forward of its own code.

    Raises:
        [`InvalidConfig`]: if it multiplies with weights outside `torch.nn.Linear`, for example stacked experts.
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
            f"the arithmetic bound does not know how '{other[0]}' multiplies: its weight is not in a torch.nn.Linear.",
            do="Leave the bound out of --strategies.",
        )


def needed_products(
    layers: Sequence[Linear], config: Any, *, lengths: Sequence[int], trained: int, dtype: torch.dtype
) -> list[Product]:
    """Return the matrix products of a micro-batch of documents with these lengths and `trained` trained positions.

    `layers` are those of [`linears`], `config` is that of the model's text part.
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
    """Yield the products of scores and values, forward and backward, for the unmasked half: with half the heads."""
    rows = max(tokens * heads // 2, 1)
    copies = -(-rows // min(seen, max(_LARGEST // seen, 1)))
    calls = -(-copies * min(seen, rows) * seen // _LARGEST)
    together = -(-copies // calls)
    rows = max(round(rows / (calls * together)), 1)
    # Scores and gradient of the probabilities; values and gradient of the queries; gradients of keys and values.
    yield Product(calls * 2, together, rows, head_dim, seen, "right")
    yield Product(calls * 2, together, rows, seen, head_dim)
    yield Product(calls * 2, together, rows, seen, head_dim, "left")


class ProductsOnly:
    """Replacement of a training step of a `PackedSFTTrainer` that runs only the products of a micro-batch.

    Its model is unpatched and not trained.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._layers, self._room = trainer, None, [torch.empty(0)] * 3

    def __call__(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run the products of a micro-batch and return a loss of zero."""
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
        """Return an operand of random numbers, or room for results, in memory that is allocated once."""
        copies, rows, columns = shape
        size = copies * rows * columns
        if self._room[place].numel() < size:
            self._room[place] = torch.randn(size, dtype=dtype, device=device)
        room = self._room[place][:size]
        return room.view(copies, columns, rows).mT if flip else room.view(shape)


# The worker processes of the benchmark import this file under the second name.
if __name__ in ("__main__", "__mp_main__"):
    bounds = {"bfd-bound": BFD, "step-bound": STEP}
    KINDS.update({name: Kind(strategy, micro_batch=ProductsOnly) for name, strategy in bounds.items()})
if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
