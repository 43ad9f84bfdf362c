"""TRL's fused LM head for labelled positions only, on devices without a Triton kernel.

On these devices TRL's head also multiplies padding and prompts with the vocabulary, and drops the result. Here it gets
the hidden states of the labelled positions only. What it computes from them stays TRL's.

Shape letters: B rows, L row length, P labelled positions, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch

from ...runtime.compile import around_graphs, outside_of_graphs
from .chunked import Head, aligned


class LabelledHead(Head):
    """A forward of a causal LM that gives the replaced forward labelled positions only if `fused_lm_head=True`.

    TRL asks with this argument for the head that it has put on the model.
    """

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replaced forward."""
        if not kwargs.get("fused_lm_head") or self._has_triton():
            return self.call_original(*args, **kwargs)
        return self._call_labelled(args, kwargs)

    def _has_triton(self) -> bool:
        """Tell whether TRL scores labelled positions only by itself."""
        return next(self.module.parameters()).device.type in ("cuda", "xpu")

    # The number of labelled positions differs in every batch, so this runs outside of graphs.
    @outside_of_graphs
    def _call_labelled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(kwargs)
        labels = (kwargs.pop("labels", None), kwargs.pop("shift_labels", None))
        _, labels_BL = aligned(labels[0] if labels[1] is None else labels[1], *labels)
        mask = labels_BL != -100

        def select(module: Any, args: Any, output: Any) -> Any:
            """Replace the hidden states `(B, L, D)` by those of the labelled positions, `(1, P, D)`."""
            hidden_BLD, _ = aligned(output.last_hidden_state, *labels)
            output.last_hidden_state = hidden_BLD[mask.to(hidden_BLD.device)][None]
            return output

        module: Any = self.module
        handle = module.base_model.register_forward_hook(select)
        try:
            output = self.call_original(*args, shift_labels=labels_BL[mask][None], **kwargs)
        finally:
            handle.remove()
        if "label_mask" not in output:  # the model's own output: TRL has put no head on it
            return self.call_original(*args, **given)
        scored = output.label_mask.shape
        for name, scores in list(output.items()):
            if isinstance(scores, torch.Tensor) and scores.shape == scored:  # back to their places `(B, L)`
                output[name] = scores.new_zeros(mask.shape).masked_scatter(mask.to(scores.device), scores)
        return output
