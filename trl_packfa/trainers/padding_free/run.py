"""`PaddingFreeRun`: what a trainer without padding counts, checks and logs while it trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from ...api import unpatch
from ...checking.first_batch import check_padded_call
from ...comparison import Comparison
from ...data.collating import CountingCollator
from ...errors import UnsupportedModel
from ...layout.padded_rows import PaddedRows
from ...parallel.ranks import summed
from ...patching.state import find_state, unpadding_of
from ...terminal.telling import tell_end
from ..clock import TrainingClock

logger = logging.getLogger(__name__)

STATE = "trl_packfa_padding_free"  # the attribute of a trainer that holds its run
# The attribute of a trainer that holds the trained model.
POLICY = "model"


def attached_run(trainer: Any) -> PaddingFreeRun | None:
    """Return the run that is attached to a trainer, or `None` if the trainer pads."""
    return getattr(trainer, STATE, None)


# Metrics that TRL averages over all positions of a padded batch, padding included. None of them is a loss.
_OVER_PADS = {
    "ORPOTrainer": ("logits/chosen", "logits/rejected"),
    "CPOTrainer": ("logits/chosen", "logits/rejected"),
    "OnlineDPOTrainer": ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"),
}


class PaddingFreeRun(TrainingClock):
    """The callback of a trainer without padding: it counts rows, checks the first batch, and adds logs.

    `models` run without padding, by the attribute that holds them; those in `left_padded` stay padded. `first_calls`
    are the results of the first batch's comparison for each model. With `shares`, rows share prefixes.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.models: dict[str, nn.Module] = {}
        self.first_calls: dict[str, Comparison] = {}
        self._step = 0  # of the last log
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
            patched.unpadding.guards, patched.unpadding.called = True, f"{type(self.trainer).__name__}.{name}"
            if self.check_first_batch:
                patched.unpadding.watch = partial(self._check_call, name)
        self._step = state.global_step
        super().on_train_begin()

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Tell the speed, without evaluations and checkpoints, and the padding of all models' rows."""
        self.take()
        seconds, of_all = self._over_ranks(np.asarray(self.whole))
        padding = of_all["pads"] / max(of_all["tokens"] + of_all["pads"], 1)
        tell_end(args, tokens=of_all["trained"], seconds=seconds, padding=padding, said=self.said)

    def _counts(self) -> np.ndarray:
        """Read the seconds, and the counts of this rank.

        They are true tokens and documents that the policy has trained, and of all models together the true tokens, the
        pads, which were not computed, and the true tokens that were computed in another row.
        """
        states = {name: find_state(model) for name, model in self.models.items()}
        counted = {name: state.unpadding for name, state in states.items() if state is not None and state.unpadding}
        policy = counted.get(POLICY)
        trained = (0, 0) if policy is None else (policy.trained, policy.trained_documents)
        of_all = np.sum([(0, 0, 0), *((one.tokens, one.pads, one.shared) for one in counted.values())], axis=0)
        return np.array([time.perf_counter(), *trained, *of_all])

    def _over_ranks(self, counts: np.ndarray) -> tuple[float, dict[str, int]]:
        """Return the seconds of this rank, and the other counts of all ranks by name."""
        seconds, *mine = counts.tolist()
        names = ("trained", "documents", "tokens", "pads", "shared")
        found = summed(self.trainer.accelerator, dict(zip(names, mine, strict=True)))
        return seconds, {name: int(count) for name, count in found.items()}

    def read(self) -> dict[str, float]:
        """Return the values to log since the last call, over all ranks."""
        step = self.trainer.state.global_step
        steps, self._step = step - self._step, step
        seconds, of_all = self._over_ranks(self.take())
        if not of_all["tokens"] or not seconds:
            return {}
        found = {"padding_saved": of_all["pads"] / (of_all["tokens"] + of_all["pads"])}
        if trained := of_all["trained"]:  # otherwise the policy is left padded
            documents = of_all["documents"] / max(steps, 1)
            found = {"tokens_per_second": trained / seconds, **found, "documents": documents}
        return {**found, "prefixes_shared": of_all["shared"] / of_all["tokens"]} if self.shares else found

    @property
    def said(self) -> str:
        """The result of the checks, as a sentence of a model card."""
        first = [
            f"{name} {call.difference:.1e} (allowed {call.allowed:.1e})" for name, call in self.first_calls.items()
        ]
        compared = f"; difference of the first batch from its rows alone: {', '.join(first)}" if first else ""
        return f"without padding checked on {', '.join(self.models)} before the first step{compared}."

    def _check_call(
        self, name: str, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any
    ) -> None:
        """Compare a model's first call without padding with its rows alone."""
        model, called = self.models[name], f"{type(self.trainer).__name__}.{name}"
        unpadding = unpadding_of(model)
        assert unpadding is not None
        unpadding.watch = None
        with self.paused():
            first = None if name in self.first_calls else check_padded_call(model, forward, call, rows)
        if first is not None:
            self.first_calls[name] = first = first._replace(where=called)
            logger.info(
                "trl-packfa: %s: first batch differs by %.1e from its rows alone (allowed %.1e), %d of %d places "
                "saved.", name, first.difference, first.allowed, rows.num_pads, rows.num_pads + rows.num_tokens,
            )  # fmt: skip
            first.require()
