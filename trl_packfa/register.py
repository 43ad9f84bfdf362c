"""Importing this module registers `attn_implementation="packfa"` with transformers.

```python
import trl_packfa.register

model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="packfa")
```

The import is needed because transformers has no entry points. No model is changed.
"""

from __future__ import annotations

from .versions import require_versions, tell_of_newer_versions

require_versions(training=False)

from .patching.attention_interface import register_name  # noqa: E402  # the versions must be checked first
from .patching.by_name import use_backend as use_backend  # noqa: E402

register_name()
tell_of_newer_versions()
