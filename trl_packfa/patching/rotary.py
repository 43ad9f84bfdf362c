"""The `forward` that a patch puts on rotary embeddings whose frequencies follow the length of a sequence.

Shape letters: B rows, L row length, R rotated features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..runtime.compile import outside_of_graphs
from ..runtime.context import current_layout
from ..runtime.override import Override


class RotaryOverride(Override):
    """Rotary embeddings whose frequencies depend on the longest sequence of the batch, document by document.

    transformers picks long rope's factors, and dynamic NTK's base, from the largest position it is handed: in a
    packed row one long document would change the frequencies of all others.
    """

    # Once per call, and another code for every longest document.
    @outside_of_graphs
    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """The rotary embedding's forward: cos and sin of shape `(B, L, R)`."""
        options = {} if layer_type is None else {"layer_type": layer_type}
        layout = current_layout()
        if layout is None or layout.max_seqlen < self._fixed_up_to(layer_type):
            return self.call_original(x, position_ids, **options)
        start = torch.zeros_like(position_ids[:, :1])  # one token at position 0
        self.call_original(x, start, **options)  # a position of 0 puts a base that had grown back
        short = position_ids.clamp(max=self._fixed_up_to(layer_type) - 1)  # the tables of short documents
        cos, sin = (table.flatten(0, 1).clone() for table in self.call_original(x, short, **options))
        offset = 0
        for positions in layout.split(position_ids.expand(layout.rows, -1)):
            if len(positions) >= self._fixed_up_to(layer_type):
                self.call_original(x, start, **options)
                tables = self.call_original(x, positions[None], **options)
                cos[offset : offset + len(positions)], sin[offset : offset + len(positions)] = (
                    tables[0][0],
                    tables[1][0],
                )
            offset += len(positions)
        shape = (layout.rows, layout.row_length, -1)
        return cos.view(shape), sin.view(shape)

    def _fixed_up_to(self, layer_type: str | None) -> int:
        """The sequence length in tokens up to which the frequencies are fixed."""
        rotary: Any = self.module
        parameters = rotary.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return parameters.get("original_max_position_embeddings") or rotary.original_max_seq_len


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding of a length-dependent kind (long rope, dynamic NTK)."""
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind in ("longrope", "dynamic") for kind in kinds)
