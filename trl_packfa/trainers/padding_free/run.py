"""`PaddingFreeRun`: the check of the first batch and the extra log values of a trainer without padding."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...api import unpatch
from ...errors import UnsupportedModel
from ...exactness.first_padded_batch import PaddedBatchProof, compare_padded_batch, refuse_gradients_at_pads
from ...layout.padded_rows import PaddedRows
from ...patching.apply import find_state
from ...patching.inspect import inner_model
from ...runtime.zero3 import is_partitioned
from ..common.collating import CountingCollator

logger = logging.getLogger(__name__)

# The attribute of a trainer that holds the trained model.
POLICY = "model"
# Metrics that TRL averages over all positions of a padded batch, padding included. None of them is a loss.
_OVER_PADS = {
    "ORPOTrainer": ("logits/chosen", "logits/rejected"),
    "CPOTrainer": ("logits/chosen", "logits/rejected"),
    "OnlineDPOTrainer": ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"),
}


class PaddingFreeRun(TrainerCallback):
    """The callback of a trainer without padding: it counts rows, checks the first batch, and adds logs.

    `models` run without padding, by the attribute that holds them; those in `left_padded` stay padded. `first_calls`
    are the results of the first batch's comparison for each model. With `shares`, rows share prefixes.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.models: dict[str, nn.Module] = {}
        self.first_calls: dict[str, PaddedBatchProof] = {}
        # `_since` holds the counts when the current part of training began; `_trained` the sum of the parts before it,
        # since the last log.
        self._since, self._trained, self._step = np.zeros(6), np.zeros(6), 0
        for cls in type(trainer).__mro__:
            if metrics := _OVER_PADS.get(cls.__name__):
                logger.warning(
                    "trl-packfa: %s averages %s over padding too, where nothing is computed now. These metrics will "
                    "differ from the padded run's; losses and gradients will not.",
                    cls.__name__,
                    ", ".join(metrics),
                )
        own = trainer.log

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if "loss" in logs:
                logs.update(self.read())
            return own(logs, *args, **kwargs)

        trainer.log = log
        trainer.add_callback(self)

    def use(
        self, models: dict[str, nn.Module], left_padded: Sequence[str], *, check_first_batch: bool, shares: bool
    ) -> None:
        """Use these models and settings from now on. Models that are left out are unpatched.

        The trainer's collator counts rows, and compares their beginnings if prefixes are shared.
        """
        trainer = self.trainer
        for name, model in self.models.items():
            if name not in models:
                unpatch(model)
        self.models, self.left_padded = models, tuple(left_padded)
        self.check_first_batch, self.shares = check_first_batch, shares
        if trainer.data_collator is not None and not getattr(trainer, "precompute_ref_logps", False):
            counting = isinstance(trainer.data_collator, CountingCollator)
            own = trainer.data_collator.collator if counting else trainer.data_collator
            trainer.data_collator = CountingCollator(own, share_prefixes=self.shares)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Require that all models are still patched, prepare the check of the first batch, and start the clock."""
        for name, model in self.models.items():
            patched = find_state(model)
            if patched is None or patched.unpadding is None:
                raise UnsupportedModel(
                    f"{type(self.trainer).__name__}.{name} is no longer patched to run without pads.",
                    why=["only some of the trainer's models are patched, and that combination was not verified"],
                    do="Call trl_packfa.padding_free(trainer) after the last change to its models.",
                )
            if self.check_first_batch:
                patched.unpadding.watch = partial(self._check_call, name)
        self._since, self._trained, self._step = self._counts(), np.zeros(6), state.global_step

    def _counts(self) -> np.ndarray:
        """Read the seconds and the counts so far.

        They are true tokens and documents that the policy has trained, and of all models together the true tokens, the
        pads, which were not computed, and the true tokens that were computed in another row.
        """
        states = {name: find_state(model) for name, model in self.models.items()}
        counted = {name: state.unpadding for name, state in states.items() if state is not None and state.unpadding}
        policy = counted.get(POLICY)
        trained = (0, 0) if policy is None else (policy.trained, policy.trained_documents)
        of_all = np.sum([(0, 0, 0), *((one.tokens, one.pads, one.shared) for one in counted.values())], axis=0)
        return np.array([time.perf_counter(), *trained, *of_all])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the part of training that has ended. A log, evaluation or checkpoint after it does not count."""
        now = self._counts()
        self._trained, self._since = self._trained + now - self._since, now

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start a new part of training, after a log, evaluation or checkpoint."""
        self._since = self._counts()

    on_evaluate = on_save = on_log

    def read(self) -> dict[str, float]:
        """Return the values to log since the last call, over all ranks."""
        step = self.trainer.state.global_step
        steps, self._step = step - self._step, step
        seconds, *mine = self._trained.tolist()
        self._trained = np.zeros(6)
        accelerator = self.trainer.accelerator
        own = torch.tensor(mine, dtype=torch.float64)
        sums = own if accelerator.num_processes == 1 else accelerator.reduce(own.to(accelerator.device), "sum")
        trained, documents, tokens, pads, shared = sums.tolist()
        if not tokens or not seconds:
            return {}
        found = {"padding_saved": pads / (tokens + pads)}
        if trained:  # otherwise the policy is left padded
            found = {"tokens_per_second": trained / seconds, **found, "documents": documents / max(steps, 1)}
        return {**found, "prefixes_shared": shared / tokens} if self.shares else found

    @property
    def said(self) -> str:
        """The result of the checks, as a sentence of a model card."""
        first = [
            f"{name} {call.difference:.1e} (allowed {call.allowed:.1e})" for name, call in self.first_calls.items()
        ]
        compared = f"; difference of the first batch from its rows alone: {', '.join(first)}" if first else ""
        return f"without padding proven on {', '.join(self.models)} before the first step{compared}."

    def _check_call(
        self, name: str, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any
    ) -> None:
        """Check a model's first calls without padding.

        The first call is compared with its rows alone. In the first call that trains, the loss must not read padding.
        """
        model, called = self.models[name], f"{type(self.trainer).__name__}.{name}"
        state = find_state(model)
        assert state is not None and state.unpadding is not None and state.unpads is not None
        watch, state.unpadding.watch = state.unpadding.watch, None  # because the model is called again below
        # A backbone cannot run again inside its own call with sharded weights, which are gathered once per call, nor
        # with activated LoRA, which finds its invocation tokens outside of the backbone.
        sharded = any(hasattr(p, "device_mesh") for p in inner_model(model).parameters())
        once = sharded or is_partitioned(model) or state.invocations
        if name not in self.first_calls and not once:
            started, counted = time.perf_counter(), vars(state.unpadding).copy()
            first = self.first_calls[name] = compare_padded_batch(state.unpads, forward, call, rows)
            vars(state.unpadding).update(counted)
            self._since[0] += time.perf_counter() - started  # it was no training
            logger.info(
                "trl-packfa: %s: first batch differs by %.1e from its rows alone (allowed %.1e), %d of %d places "
                "saved.", name, first.difference, first.allowed, rows.num_pads, rows.num_pads + rows.num_tokens,
            )  # fmt: skip
            first.require_exact(called)
        # With return_dict=False the outputs are a tuple with the hidden states first.
        last = outputs[0] if isinstance(outputs, tuple) else outputs.last_hidden_state
        for each in (last, *(getattr(outputs, "hidden_states", None) or ())):
            if each.requires_grad:
                refuse_gradients_at_pads(each, rows, called)
        if not last.requires_grad:
            state.unpadding.watch = watch
