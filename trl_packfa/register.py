"""`import trl_packfa.register`: from here on transformers knows `attn_implementation="packfa"`.

```python
import trl_packfa.register

model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="packfa")
```

transformers has no entry points, so the import is what registers the name. No model is changed.
"""

from __future__ import annotations

import sys
from types import ModuleType

from .versions import require_versions

require_versions(training=False)

from .patches.base import Patch  # noqa: E402  # not before the versions are known to be new enough
from .patches.registry import register as _register_patch  # noqa: E402
from .patching.named_attention import register_name  # noqa: E402
from .patching.named_models import use_backend as use_backend  # noqa: E402

register_name()


class _Register(ModuleType):
    """This module, which is also the function `trl_packfa.register` that adds a patch: both have one name."""

    def __call__(self, new: Patch) -> None:
        """Add a patch for this process, see [`trl_packfa.patches.registry.register`]."""
        _register_patch(new)


sys.modules[__name__].__class__ = _Register
