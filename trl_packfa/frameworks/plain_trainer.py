"""transformers' own `Trainer`: a callback that puts the model on `attn_implementation="packfa"` and proves it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .packing import prove, run_by_name


class PackfaCallback(TrainerCallback):
    """Trains on no model that is not proven to keep documents apart.

    ```python
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = Trainer(model, args, data_collator=collator, callbacks=[PackfaCallback()], train_dataset=dataset)
    ```
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`PackfaCallback`].

        Raises:
            [`ContaminationError`]: if packing is not exact on the model.
        """
        run_by_name(kwargs["model"])
        prove(kwargs["model"])
