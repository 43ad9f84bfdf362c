"""Callback for transformers' own `Trainer`: it switches the model to `attn_implementation="packfa"` and proves it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .packing import run_proven


class PackfaCallback(TrainerCallback):
    """Callback that stops training unless the model is proven to keep documents apart.

    ```python
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = Trainer(model, args, data_collator=collator, callbacks=[PackfaCallback()], train_dataset=dataset)
    ```
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Switch the model to `packfa`; raise [`ContaminationError`] if packing is not exact on it."""
        run_proven(kwargs["model"])
