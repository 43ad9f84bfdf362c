"""Run a model and get the input of its LM head at all positions, and the logits of some positions.

With 262,144 words, all logits take a thousand times the time and memory of the rest of a small model. So only a few
documents are scored, at every position.

Shape letters: B rows, L row length, K scored positions, D model dim, V vocabulary.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compile import runs_compiled
from ..errors import UnsupportedModel, is_out_of_memory
from ..parallel.zero3 import is_partitioned
from ..patching.inspect import inner_model
from ..patching.unpadding import states_of


class Scores(NamedTuple):
    """Input of the head `(B, L, D)`, and logits `(K, V)` of some positions, if there are any per position."""

    states: torch.Tensor
    logits: torch.Tensor | None


class Scorer:
    """A causal LM, bare or wrapped, whose head sees only some positions.

    If a model calls no head module (a classifier, a backbone), or fails with fewer positions, the states are its
    logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._comes_first = model, is_partitioned(model)
        inner: Any = inner_model(model)
        # A classifier returns `None`, and some backbones have no such method.
        get = getattr(inner, "get_output_embeddings", None)
        # A compiled graph was made without the hook, and would not call it.
        self.head: nn.Module | None = None if get is None or runs_compiled(model) else get()

    def __call__(self, call: dict[str, Any], shape: tuple[int, int], places: torch.Tensor) -> Scores:
        """Run a call on ids of this shape `(B, L)`, and score the `places` among its `B * L` positions."""
        if self.head is not None:
            try:
                found = self._run_sampled(call, shape, places)
            # A model's own code after the head may count tokens, and raise any of these.
            except (RuntimeError, ValueError, IndexError) as error:
                if is_out_of_memory(error):
                    raise
                found = None
            if found is not None:
                return found
            self.head = None
        logits = output_of(self.model, call)
        per_token = logits.dim() > 2 and logits.shape[:2] == shape
        return Scores(logits, logits.flatten(0, 1)[places.to(logits.device)] if per_token else None)

    def _run_sampled(self, call: dict[str, Any], shape: tuple[int, int], places: torch.Tensor) -> Scores | None:
        assert self.head is not None
        seen: list[torch.Tensor] = []

        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            states = args[0] if args else None
            if not isinstance(states, torch.Tensor) or states.shape[:2] != shape:
                return None
            seen.append(states)
            return states.flatten(0, 1)[places.to(states.device)][None], *args[1:]

        # DeepSpeed's own hook marks the head's input, and fails if a backward passes the mark but not the head. So
        # ours comes before it. Elsewhere ours comes last, and a user's hook on the head sees all positions.
        with self.head.register_forward_pre_hook(hook, prepend=self._comes_first):
            logits = output_of(self.model, call)
        if len(seen) != 1 or logits.shape[:2] != (1, len(places)):
            return None
        return Scores(seen[0], logits[0])


def output_of(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    """Return the logits or hidden states of a call, of the model inside if a wrapper returns something else."""
    if is_multiple_choice(model):  # each text is a question with one choice
        call = {name: value[:, None] if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    for run in (model, inner_model(model)):
        outputs = run(**call, **_without_cache(run))
        with suppress(UnsupportedModel):
            if not isinstance(outputs, tuple):  # the first entry of a wrapper's own tuple may be anything
                return states_of(outputs)
    raise UnsupportedModel(f"{type(inner_model(model)).__name__} returns neither logits nor hidden states.")


def is_multiple_choice(model: nn.Module) -> bool:
    """Tell whether a model takes ids of shape `(B, choices, L)`."""
    return type(inner_model(model)).__name__.endswith("ForMultipleChoice")


def _without_cache(model: nn.Module) -> dict[str, bool]:
    takes = inspect.signature(type(model).forward).parameters
    named = "use_cache" in takes or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    return {"use_cache": False} if named else {}
