"""ms-swift 4: a callback, `swift sft --external_plugins FILE --callbacks packfa --attn_impl sdpa`; FILE is this one.

ms-swift allows `--packing` and `--padding_free` with FlashAttention only. This callback switches its template to
padding-free itself, once the model runs with `attn_implementation="packfa"`: a micro-batch is one row, on any device.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

# ms-swift imports this file by its path, so it knows no package around it.
from trl_packfa.errors import InvalidConfig, VersionTooOld
from trl_packfa.frameworks.packing import prove, run_by_name

try:
    from swift.callbacks import callbacks_map  # type: ignore[import-not-found]  # no dependency
except ImportError as error:
    raise VersionTooOld(
        "trl_packfa.frameworks.ms_swift_plugin needs ms-swift 4 or newer, whose trainers have a map of callbacks.",
        why=[str(error)],
        do="pip install 'ms-swift>=4'",
    ) from error


class PackfaCallback(TrainerCallback):
    """Makes a run padding-free and exact.

    Args:
        args (`swift.TrainingArguments`), trainer (`swift.Trainer`):
            As ms-swift hands them to its callbacks.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`PackfaCallback`]; the first batch is made after it.

        Raises:
            [`PackingError`]: if the type is not served, packing is not exact, or the template cannot do it.
        """
        template = self.trainer.template
        if getattr(template, "support_padding_free", None) is False:
            raise InvalidConfig(
                f"{type(template).__name__} supports no padding-free rows.",
                do="Drop --callbacks packfa, or choose another template.",
            )
        run_by_name(self.trainer.model)
        prove(self.trainer.model)
        template.padding_free = self.trainer.padding_free = True


callbacks_map["packfa"] = PackfaCallback
