"""TRL's fused LM head for labelled positions only, in padded batches that run without their pads.

On devices without a Triton kernel TRL's head also multiplies padding and prompts with the vocabulary, and drops the
result. Here the backbone gives it the hidden states of the labelled positions only. What it computes from them stays
TRL's.

Shape letters: B rows, L row length, P labelled positions, D model dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...compile import around_graphs, outside_of_graphs
from ...layout.call_context import current_call, in_call
from ...override import Override, forward_signature
from .chunked import Head


class LabelledHead(Override):
    """A forward of a causal LM that gives the replaced forward labelled positions only if `fused_lm_head=True`.

    TRL asks with this argument for the head that it has put on the model. A [`Head`] selects positions by itself.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.__signature__ = forward_signature(module)

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replaced forward, and put its scores back to their places `(B, L)`."""
        if not kwargs.get("fused_lm_head") or isinstance(self.original, Head):
            return self.call_original(*args, **kwargs)
        given = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        mask, labels_1P = _labelled(*given)
        with in_call(replace(current_call(), labelled=mask)):
            output = self.call_original(*args, shift_labels=labels_1P, **kwargs)
        return _put_back(output, mask)


@outside_of_graphs
def keep_labelled(outputs: Any, mask: torch.Tensor) -> Any:
    """Return a backbone's outputs with the hidden states of the positions in `mask` only, `(1, P, D)`."""
    # Labels that were shifted are one fewer than positions.
    states_BLD = outputs.last_hidden_state[:, : mask.shape[1]]
    return type(outputs)(**{**outputs, "last_hidden_state": states_BLD[mask.to(states_BLD.device)][None]})


@outside_of_graphs
def _labelled(labels: Any, shift_labels: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask `(B, L)` of the positions with labels, and these labels `(1, P)`."""
    labels_BL = labels[:, 1:] if shift_labels is None else shift_labels
    mask = labels_BL != -100
    return mask, labels_BL[mask][None]


@outside_of_graphs
def _put_back(output: Any, mask: torch.Tensor) -> Any:
    own = output.label_mask.shape
    for name, scores in list(output.items()):
        if isinstance(scores, torch.Tensor) and scores.shape == own:
            output[name] = scores.new_zeros(mask.shape).masked_scatter(mask.to(scores.device), scores)
    return output
