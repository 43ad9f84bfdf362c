"""The `forward` for rotary embeddings whose frequencies depend on the length of a sequence.

Shape letters: B rows, L row length, R rotated features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..compile import outside_of_graphs
from ..layout.call_context import current_call, packed_call
from ..override import Override, attributes_set, forward_signature, named_arguments

# Kinds of rotary embeddings whose frequencies depend on the longest sequence of the batch.
LENGTH_DEPENDENT = ("longrope", "dynamic")


class RotaryOverride(Override):
    """Forward of a rotary embedding whose frequencies depend on the longest sequence; it runs document by document.

    transformers picks long rope's factors, and dynamic NTK's base, by the largest position in the call.
    """

    # It runs once per call, and the longest document decides what it does.
    @outside_of_graphs
    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin, each of shape `(B, L, R)`."""
        options = {} if layer_type is None else {"layer_type": layer_type}
        layout = current_call().layout
        if layout is not None and layout.shard is not None:
            # The tables of the whole row are small beside the states of a layer, and need no other process.
            with packed_call(layout.whole):
                tables = self(x, layout.position_ids(), layer_type)
            return tuple(layout.shard.local(table, dim=1) for table in tables)
        if layout is None or layout.max_seqlen < (fixed := self._fixed_up_to(layer_type)):
            return self.call_original(x, position_ids, **options)
        start = torch.zeros_like(position_ids[:, :1])  # one token at position 0
        self.call_original(x, start, **options)  # a call at position 0 resets a base that had grown
        short = position_ids.clamp(max=fixed - 1)  # for the tables of short documents
        cos, sin = (table.flatten(0, 1).clone() for table in self.call_original(x, short, **options))
        offset = 0
        for positions in layout.split(position_ids.expand(layout.rows, -1)):
            place = slice(offset, offset + len(positions))
            if len(positions) >= fixed:
                self.call_original(x, start, **options)
                tables = self.call_original(x, positions[None], **options)
                cos[place], sin[place] = tables[0][0], tables[1][0]
            offset = place.stop
        shape = (layout.rows, layout.row_length, -1)
        return cos.view(shape), sin.view(shape)

    def _fixed_up_to(self, layer_type: str | None) -> int:
        """Return the sequence length in tokens up to which the frequencies are fixed."""
        rotary: Any = self.module
        parameters = rotary.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return parameters.get("original_max_position_embeddings") or rotary.original_max_seq_len


@contextmanager
def fresh_frequencies(model: nn.Module) -> Iterator[None]:
    """Make every call of a rotary embedding begin with the frequencies of a new model, inside a `with` block.

    A base of dynamic NTK that has grown for one sequence stays for later ones, unless these are short. A call's result
    would then depend on the calls before it. After the block the frequencies are restored.
    """
    rotary = [module for module in model.modules() if depends_on_length(module)]
    inside: list[tuple[nn.Module, str, Any]] = []
    for module in rotary:
        # Copies of the buffers, which some modules update in place, and the frequencies that are attributes.
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        inside += [(module, name, buffer.clone()) for name, buffer in buffers]
        own = vars(module).items()
        inside += [(module, name, x) for name, x in own if name.endswith(("_freq", "_cached", "_scaling"))]
    with attributes_set(inside), ExitStack() as hooks:
        for module in rotary:
            hooks.enter_context(module.register_forward_pre_hook(_forget, with_kwargs=True))
        yield


def _forget(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reset a grown base by the module's own code: a call with one token at position 0 resets it."""
    call = named_arguments(tuple(forward_signature(module).parameters), args, kwargs)
    start = torch.zeros_like(call["position_ids"])[..., :1]
    with torch.no_grad():
        type(module).forward(module, **{**call, "position_ids": start})


def depends_on_length(module: nn.Module) -> bool:
    """Tell whether a module is a rotary embedding of a length-dependent kind (long rope, dynamic NTK)."""
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind in LENGTH_DEPENDENT for kind in kinds)
