"""Axolotl plugin that makes sample packing exact on any device.

```yaml
attn_implementation: sdpa          # packed rows use it nowhere: the plugin patches the model
sample_packing: true
plugins:
  - trl_packfa.frameworks.axolotl_plugin.PackfaPlugin
```

Axolotl accepts any class with the methods of its plugins. This class follows the calls of Axolotl 0.19.0 and imports
nothing from Axolotl.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from ..errors import InvalidConfig
from .packing import packed_row, patch_checked

# Hooks that must return a list; `None` is not enough.
_LISTS = ("get_adapter_capabilities", "add_callbacks_pre_trainer", "add_callbacks_post_trainer")


class PackfaCollator:
    """Collator that joins the rows of Axolotl's sampler, each a list of documents, into one packed row.

    The tokenizer's pad token fills the row up to a multiple of `pad_to_multiple_of`; the padding is one more document.
    Axolotl's other `options` are about padding, so they are ignored.
    """

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None, **options: Any) -> None:
        self.pad_token_id = tokenizer.pad_token_id or 0
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, features: list[Any], return_tensors: str = "pt") -> dict[str, Any]:
        """Collate the sampled features, which are documents or lists of documents."""
        rows = features if isinstance(features[0], list) else [features]
        options = {"pad_token_id": self.pad_token_id, "pad_to_multiple_of": self.pad_to_multiple_of}
        return packed_row(list(chain.from_iterable(rows)), **options)


class PackfaPlugin:
    """Plugin with Axolotl's hooks. Three hooks act: before the model is loaded, after it, and for the collator."""

    def register(self, cfg: Any) -> None:
        """Raise [`InvalidConfig`] for a config that would build other rows or use another attention."""
        if not cfg.get("sample_packing"):
            raise InvalidConfig(
                "PackfaPlugin needs sample_packing: without it, no row holds several documents.",
                do="Set sample_packing: true.",
            )
        if cfg.get("attn_implementation") not in (None, "sdpa"):
            raise InvalidConfig(
                f"PackfaPlugin does not work with attn_implementation: {cfg.get('attn_implementation')}. It would run "
                "in its place, or need a kernel that nothing uses.",
                do="Set attn_implementation: sdpa.",
            )

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patch the loaded model with its adapter, and check that packing is exact ([`patch_checked`])."""
        patch_checked(model)

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type, dict[str, Any]] | None:
        """Return the collator of packed rows; return `None`, for Axolotl's own, if evaluation is not packed."""
        if is_eval and cfg.get("eval_sample_packing") is False:
            return None
        return PackfaCollator, {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a hook that does nothing, for every other hook of this or a later version."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: {} if name == "get_lora_config_kwargs" else [] if name in _LISTS else None
