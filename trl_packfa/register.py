"""`import trl_packfa.register`: from here on transformers knows `attn_implementation="packfa"`.

```python
import trl_packfa.register

model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="packfa")
```

transformers has no entry points, so the import is what registers the name. No model is changed.
"""

from __future__ import annotations

from .versions import require_versions, tell_of_newer_versions

require_versions(training=False)

from .patching.named_attention import register_name  # noqa: E402  # not before the versions are known to be new enough
from .patching.named_models import use_backend as use_backend  # noqa: E402

register_name()
tell_of_newer_versions()
