"""`use_liger_kernel=True`: apply Liger's own patch to a model before ours.

The Trainer would apply it when training starts. That is too late: the exactness check would have proven another model,
and Liger's forwards would replace those that keep documents apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from ...errors import InvalidConfig

logger = get_logger(__name__)


def refuse_missing_liger(args: TrainingArguments) -> None:
    """Refuse `use_liger_kernel=True` if liger-kernel is not installed."""
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise InvalidConfig(
            "use_liger_kernel=True, but liger-kernel is not installed.",
            do="pip install 'trl-packfa[kernels]'. Then drop use_liger_kernel: on CUDA, packed calls use Liger's "
            "kernels without it.",
        )


def apply_liger(model: Any, args: TrainingArguments) -> None:
    """Apply Liger's own patch as the Trainer would, if the arguments ask for it."""
    if not args.use_liger_kernel:
        return
    apply_liger_kernel(model, args.liger_kernel_config)
    logger.info(
        "trl-packfa: use_liger_kernel=True: Liger has patched the model, and the exactness check will check it so. "
        "Without it, packed calls on CUDA use the same kernels, and gated MLPs with LoRA run fused."
    )


@contextmanager
def already_applied(args: TrainingArguments) -> Iterator[None]:
    """Switch `use_liger_kernel` off inside a `with` block, so that the Trainer does not patch the model again."""
    # The Trainer reads the argument when it prepares the model for training.
    asked, args.use_liger_kernel = args.use_liger_kernel, args.use_liger_kernel and not getattr(args, "packing", False)
    try:
        yield
    finally:
        args.use_liger_kernel = asked
