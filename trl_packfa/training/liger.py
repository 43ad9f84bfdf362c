"""`use_liger_kernel=True`: Liger's own patch of a model, made before ours.

The Trainer makes it when training starts. By then the exactness check would have proven another model, and Liger would
put its forwards over those that keep documents apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from ..errors import InvalidConfig

logger = get_logger(__name__)


def refuse_missing_liger(args: TrainingArguments) -> None:
    """Liger that is asked for and not there.

    Raises:
        [`InvalidConfig`]: before anything is loaded, not when training starts.
    """
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise InvalidConfig(
            "use_liger_kernel=True, and liger-kernel is not installed.",
            do="pip install 'trl-packfa[kernels]'. Drop use_liger_kernel then: on CUDA, packed calls use Liger's "
            "kernels without it.",
        )


def apply_liger(model: Any, args: TrainingArguments) -> None:
    """Liger's own patch, if the arguments ask for it, as the Trainer would make it."""
    if not args.use_liger_kernel:
        return
    apply_liger_kernel(model, args.liger_kernel_config)
    logger.info(
        "trl-packfa: use_liger_kernel=True: Liger has patched the model, the exactness check proves it so. Without it "
        "packed calls on CUDA use the same kernels, and gated MLPs with LoRA run fused."
    )


@contextmanager
def already_applied(args: TrainingArguments) -> Iterator[None]:
    """For the length of a `with` block the Trainer is not asked to patch the model again."""
    # The Trainer reads the argument when it prepares the model for training.
    asked, args.use_liger_kernel = args.use_liger_kernel, args.use_liger_kernel and not getattr(args, "packing", False)
    try:
        yield
    finally:
        args.use_liger_kernel = asked
