"""Running a model for the input of its LM head, all positions, and for the logits of a few of them.

A head treats every token by itself. Logits of a few positions tell as much of it as all of them, which at 262,144
words take a thousand times the time and memory of the rest of a small model.

Shape letters: B rows, L row length, K scored positions, D model dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import is_out_of_memory
from ..patching.inspect import inner_model
from ..runtime.compile import runs_compiled


class Scores(NamedTuple):
    """Input of the head `(B, L, D)`, and logits `(K, V)` of some positions."""

    states: torch.Tensor
    logits: torch.Tensor


class Scorer:
    """Runs a causal LM and lets its head see a few positions only.

    Where a model calls no head module, or cannot go on with fewer positions, the states are its logits.

    Args:
        model (`torch.nn.Module`):
            The causal LM, bare or wrapped; or a classifier or a backbone, whose outputs are few.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        inner: Any = inner_model(model)
        # A classifier answers `None`, some backbones have no such method.
        get = getattr(inner, "get_output_embeddings", None)
        # A compiled graph was made without the hook, and would keep it.
        self.head: nn.Module | None = None if get is None or runs_compiled(model) else get()

    def __call__(self, call: dict[str, Any], shape: tuple[int, int], places: torch.Tensor) -> Scores:
        """Run a call on ids of this shape `(B, L)`; score these of its `B * L` positions."""
        if self.head is not None:
            try:
                found = self._run_sampled(call, shape, places)
            # Whatever a model's own code raises after its head, where it counts tokens.
            except (RuntimeError, ValueError, IndexError) as error:
                if is_out_of_memory(error):
                    raise
                found = None
            if found is not None:
                return found
            self.head = None
        logits = output_of(self.model, call)
        flat = logits.flatten(0, 1) if logits.shape[:2] == shape else logits
        return Scores(logits, flat[places.to(flat.device)] if flat is not logits else flat)

    def _run_sampled(self, call: dict[str, Any], shape: tuple[int, int], places: torch.Tensor) -> Scores | None:
        assert self.head is not None
        seen: list[torch.Tensor] = []

        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            states = args[0] if args else None
            if not isinstance(states, torch.Tensor) or states.shape[:2] != shape:
                return None
            seen.append(states)
            return states.flatten(0, 1)[places.to(states.device)][None], *args[1:]

        handle = self.head.register_forward_pre_hook(hook)
        try:
            logits = output_of(self.model, call)
        finally:
            handle.remove()
        if len(seen) != 1 or logits.shape[:2] != (1, len(places)):
            return None
        return Scores(seen[0], logits[0])


def output_of(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    """Logits or hidden states of a call; of a wrapper that returns something else, those of the model inside."""
    outputs = model(**call, use_cache=False)
    for name in ("logits", "last_hidden_state"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    outputs = inner_model(model)(**call, use_cache=False)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
