"""What a trainer without padding does beside its own work: the proof on the first batch, and what its logs gain."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import UnsupportedModel
from ..patching.apply import PatchState, find_state
from ..patching.inspect import find_backbone, inner_model
from ..runtime.padded_rows import PaddedRows
from ..runtime.zero3 import is_partitioned
from .collating import CountingCollator, told_rows
from .first_call import FirstCall, compare_first_call, refuse_gradients_at_pads

logger = logging.getLogger(__name__)


class PaddingFreeRun:
    """What a trainer without padding does beside its own work: tells masks' rows, proves the first batch, reports.

    Attributes:
        first_calls (`dict[str, FirstCall]`): of each model what the comparison of the first batch came to.
    """

    def __init__(
        self, trainer: Any, models: dict[str, nn.Module], *, check_first_batch: bool, shares: bool = False
    ) -> None:
        self.trainer, self.models, self.check_first_batch, self.shares = trainer, models, check_first_batch, shares
        self.first_calls: dict[str, FirstCall] = {}
        self._since: tuple[float, ...] | None = None
        self._step = 0
        self._paused = 0.0

    def attach(self) -> None:
        """Put it on the trainer."""
        trainer = self.trainer
        if trainer.data_collator is not None and not getattr(trainer, "precompute_ref_logps", False):
            trainer.data_collator = CountingCollator(trainer.data_collator, share_prefixes=self.shares)
            trainer._prepare_inputs = _Telling(trainer._prepare_inputs)
        trainer.log = _Logging(trainer.log, self)
        trainer.add_callback(PaddingFreeCallback(self))

    def begin(self) -> None:
        """Arm the comparison of the first batch, require that all models are still patched, start the clock."""
        for name, model in self.models.items():
            state = find_state(model)
            if state is None or state.unpadding is None:
                raise UnsupportedModel(
                    f"{type(self.trainer).__name__}.{name} is no longer patched to run without pads.",
                    why=["half of a trainer's models without pads is no run that was proven"],
                    do="Call trl_packfa.padding_free(trainer) after the last change to its models.",
                )
            if self.check_first_batch:
                state.unpadding.watch = _Watching(self, name, model, state)
        self._since, self._step = self._counts(), self.trainer.state.global_step

    def _counts(self) -> tuple[float, ...]:
        """The time, and what the models have run: true tokens trained, true tokens, pads, the policy's documents, true
        tokens that were computed in another row."""
        counted = [state.unpadding for model in self.models.values() if (state := find_state(model)) is not None]
        counted = [unpadding for unpadding in counted if unpadding is not None]
        policy = counted[0]
        tokens, pads = sum(one.tokens for one in counted), sum(one.pads for one in counted)
        shared = sum(one.shared for one in counted)
        return time.perf_counter(), policy.trained, tokens, pads, policy.trained_documents, shared

    def read(self) -> dict[str, float]:
        """What the log gains since the last time, over all ranks."""
        step = self.trainer.state.global_step
        steps, self._step = step - self._step, step
        if self._since is None:
            return {}
        now, before = self._counts(), self._since
        seconds, self._since, self._paused = now[0] - before[0] - self._paused, now, 0.0
        mine = torch.tensor([a - b for a, b in zip(now[1:], before[1:], strict=True)], dtype=torch.float64)
        accelerator = self.trainer.accelerator
        sums = mine if accelerator.num_processes == 1 else accelerator.reduce(mine.to(accelerator.device), "sum")
        trained, tokens, pads, documents, shared = sums.tolist()
        if not trained or not tokens:
            return {}
        found = {
            "tokens_per_second": trained / seconds,
            "padding_saved": pads / (tokens + pads),
            "documents": documents / max(steps, 1),
        }
        return {**found, "prefixes_shared": shared / tokens} if self.shares else found

    @property
    def said(self) -> str:
        """What was proven, as a sentence of a model card."""
        first = [
            f"{name} {call.difference:.1e} (allowed {call.allowed:.1e})" for name, call in self.first_calls.items()
        ]
        compared = f"; the first batch from its rows alone: {', '.join(first)}" if first else ""
        return f"without its pads proven on {', '.join(self.models)} before the first step{compared}."

    def pause(self, seconds: float) -> None:
        """What took no part in training takes nothing off its speed."""
        self._paused += seconds


class PaddingFreeCallback(TrainerCallback):
    """Where a [`PaddingFreeRun`] begins."""

    def __init__(self, run: PaddingFreeRun) -> None:
        self.run = run

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prove on the first batch of each model; see [`PaddingFreeRun.begin`]."""
        self.run.begin()


class _Telling:
    """A trainer's `_prepare_inputs`, before which masks are told their rows."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return told_rows(self.own(inputs, *args, **kwargs))


class _Logging:
    """A trainer's `log`, with what padding-free training has saved."""

    def __init__(self, own: Callable[..., Any], run: PaddingFreeRun) -> None:
        self.own, self.run = own, run

    def __call__(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:
            logs.update(self.run.read())
        return self.own(logs, *args, **kwargs)


class _Watching:
    """Compares one model's first call without pads with its rows alone, and requires of the first that trains that its
    loss reads no pads."""

    def __init__(self, run: PaddingFreeRun, name: str, model: nn.Module, state: PatchState) -> None:
        self.run, self.name, self.model, self.state = run, name, model, state

    def __call__(self, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any) -> None:
        unpadding, called = self.state.unpadding, f"{type(self.run.trainer).__name__}.{self.name}"
        assert unpadding is not None
        unpadding.watch = None  # it is called again below
        if self.name not in self.run.first_calls and _is_whole(self.model, self.state):
            self._compare(forward, call, rows).require_exact(called)
        states = (outputs.last_hidden_state, *(getattr(outputs, "hidden_states", None) or ()))
        for each in states:
            if each.requires_grad:
                refuse_gradients_at_pads(each, rows, called)
        if not states[0].requires_grad:
            unpadding.watch = self

    def _compare(self, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows) -> FirstCall:
        started, counted = time.perf_counter(), vars(self.state.unpadding).copy()
        first = compare_first_call(find_backbone(self.model, self.state.patch), forward, call, rows)
        vars(self.state.unpadding).update(counted)
        self.run.pause(time.perf_counter() - started)
        self.run.first_calls[self.name] = first
        logger.info(
            "trl-packfa: %s: first batch without pads %.1e from its rows alone (allowed %.1e), %d of %d places saved.",
            self.name, first.difference, first.allowed, rows.num_pads, rows.num_pads + rows.num_tokens,
        )  # fmt: skip
        return first


def _is_whole(model: nn.Module, state: PatchState) -> bool:
    """Whether a backbone can run again inside its own call: weights in parts are gathered once for each, and activated
    LoRA finds its invocation outside of it."""
    sharded = any(hasattr(p, "device_mesh") for p in inner_model(model).parameters())
    return not (sharded or is_partitioned(model) or state.invocations)
