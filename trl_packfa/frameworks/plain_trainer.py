"""Callback for transformers' own `Trainer`: it patches the model and checks it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .packing import patch_checked


class PackfaCallback(TrainerCallback):
    """Callback that stops training unless packing is exact on the model.

    ```python
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = Trainer(model, args, data_collator=collator, callbacks=[PackfaCallback()], train_dataset=dataset)
    ```
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Patch the model; raise [`ContaminationError`] if packing is not exact on it."""
        patch_checked(kwargs["model"])
