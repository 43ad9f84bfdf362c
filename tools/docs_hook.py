"""Hook of the documentation site that cleans docstrings in Hugging Face's style, which the generator shows raw."""

from __future__ import annotations

import re
from typing import Any

_REFERENCE = re.compile(r"\[<code>~?([\w.]+)</code>\]")
_TYPE = re.compile(r"<code>(\[?`[^<]*)</code>")


def on_page_content(html: str, **kwargs: Any) -> str:
    """Remove the brackets of references, and the backticks and asterisks of types."""
    html = _REFERENCE.sub(r"<code>\1</code>", html)
    return _TYPE.sub(lambda found: f"<code>{re.sub(r'[`*]', '', found[1]).strip('[]')}</code>", html)
