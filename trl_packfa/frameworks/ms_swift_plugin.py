"""ms-swift 4 callback; FILE is this file: `swift sft --external_plugins FILE --callbacks packfa --attn_impl sdpa`.

ms-swift allows `--packing` and `--padding_free` with FlashAttention only. This callback first patches the model,
then switches its template to padding-free. Each micro-batch is one row, on any device.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

# Absolute imports: ms-swift imports this file by its path, so relative imports would fail.
from trl_packfa.errors import InvalidConfig, VersionTooOld
from trl_packfa.frameworks.packing import patch_checked

try:
    from swift.callbacks import callbacks_map  # type: ignore[import-not-found]  # no dependency
except ImportError as error:
    raise VersionTooOld(
        "trl_packfa.frameworks.ms_swift_plugin needs ms-swift 4 or newer, which has `callbacks_map`.",
        why=[str(error)],
        do="pip install 'ms-swift>=4'",
    ) from error


class PackfaCallback(TrainerCallback):
    """Callback that makes a training run padding-free and exact.

    Args:
        args (`swift.TrainingArguments`), trainer (`swift.Trainer`):
            The arguments that ms-swift passes to its callbacks.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Patch and check the model, and switch its template; the first batch is made later."""
        template = self.trainer.template
        if getattr(template, "support_padding_free", None) is False:
            raise InvalidConfig(
                f"the template {type(template).__name__} does not support padding-free rows.",
                do="Drop --callbacks packfa, or choose another template.",
            )
        patch_checked(self.trainer.model)
        template.padding_free = self.trainer.padding_free = True


callbacks_map["packfa"] = PackfaCallback
