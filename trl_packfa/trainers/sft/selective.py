"""Selective checkpointing, which saves the results of attention and computes the rest of a layer again.

TRL's `gradient_checkpointing_kwargs={"selective": True}` knows SDPA's and flash-attn's operators by name, but not
torch's `varlen_attn`. And since transformers 5.23 its switch on a PEFT model is never asked: the model inside has one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from peft import PeftModel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

# Parts of the names of attention operators: torch's SDPA, torch's `varlen_attn`, flash-attn, and ours in graphs.
_ATTENTION = ("scaled_dot_product", "varlen_attn", "flash_attn", "trl_packfa.attend")


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = any(name in str(op) for name in _ATTENTION)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveCheckpointing:
    """A model's `gradient_checkpointing_enable` that saves the results of attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Switch checkpoints on, which cannot be reentrant."""
        given = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        given["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        given.pop("selective", None)  # TRL's own key
        type(self.model).gradient_checkpointing_enable(self.model, given, **options)


def save_attention(model: PreTrainedModel | PeftModel) -> None:
    """Let the checkpoints of a model save the results of attention, whoever switches them on."""
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    # transformers' newer name of the switch calls an instance's own `gradient_checkpointing_enable`.
    for owner in (model, inner):
        owner.gradient_checkpointing_enable = SelectiveCheckpointing(inner)  # type: ignore[method-assign]
