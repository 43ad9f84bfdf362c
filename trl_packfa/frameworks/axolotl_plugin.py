"""Axolotl: a plugin that packs its rows exactly on any device.

```yaml
attn_implementation: sdpa          # Axolotl knows no other name; the plugin takes its place
sample_packing: true
plugins:
  - trl_packfa.frameworks.axolotl_plugin.PackfaPlugin
```

Axolotl takes any class with the methods of its plugins. This one is written from how they are called (0.19.0) and
imports nothing of Axolotl's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from ..errors import InvalidConfig
from .packing import packed_row, prove, run_by_name

# What hooks return of which more than `None` is expected.
_LISTS = ("get_adapter_capabilities", "add_callbacks_pre_trainer", "add_callbacks_post_trainer")


class PackfaCollator:
    """Rows of Axolotl's sampler, each a list of documents, as one packed row.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Whose pad token fills the row.
        pad_to_multiple_of (`int`, *optional*):
            Pad the row, by one more document, to a multiple of this.
        options (`Any`):
            What else Axolotl hands its collators; nothing of it is needed without padding.
    """

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None, **options: Any) -> None:
        self.pad_token_id = tokenizer.pad_token_id or 0
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, features: list[Any], return_tensors: str = "pt") -> dict[str, Any]:
        """Collate what the sampler has chosen, documents or lists of them."""
        rows = features if isinstance(features[0], list) else [features]
        options = {"pad_token_id": self.pad_token_id, "pad_to_multiple_of": self.pad_to_multiple_of}
        return packed_row(list(chain.from_iterable(rows)), **options)


class PackfaPlugin:
    """Axolotl's hooks, of which three do something: before a model is loaded, after, and for the collator."""

    def register(self, cfg: Any) -> None:
        """Refuse a config whose rows would be built or attended otherwise.

        Raises:
            [`InvalidConfig`]: naming the field.
        """
        if not cfg.get("sample_packing"):
            raise InvalidConfig(
                "PackfaPlugin without sample_packing: there is nothing to keep apart.", do="Set sample_packing: true."
            )
        if cfg.get("attn_implementation") not in (None, "sdpa"):
            raise InvalidConfig(
                f"PackfaPlugin with attn_implementation: {cfg.get('attn_implementation')}, which would run in its "
                "place or need a kernel for nothing.",
                do="Set attn_implementation: sdpa.",
            )

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Put the loaded model, with its adapter, on `packfa`, and prove it.

        Raises:
            [`PackingError`]: if its type is not served, or packing is not exact on it.
        """
        run_by_name(model)
        prove(model)

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type, dict[str, Any]] | None:
        """The collator of packed rows; of evaluation that is not packed, Axolotl's own."""
        if is_eval and cfg.get("eval_sample_packing") is False:
            return None
        return PackfaCollator, {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Any other hook, of this version or a later one: it does nothing."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: {} if name == "get_lora_config_kwargs" else [] if name in _LISTS else None
