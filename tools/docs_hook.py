"""Hook of the documentation site that cleans docstrings in Hugging Face's style, which the generator shows raw."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_REFERENCE = re.compile(r"\[<code>~?([\w.]+)</code>\]")
_TYPE = re.compile(r"<code>(\[?`[^<]*)</code>")

_README = Path(__file__).parents[1] / "README.md"
_FILES = "https://github.com/trl-packfa/trl-packfa/blob/main/"


def on_files(files: Any, config: Any, **kwargs: Any) -> Any:
    """Add README as the site's first page, so that its text stands in one place."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # in the extra `docs`

    files.append(File.generated(config, "index.md", content=home(_README.read_text())))
    return files


def home(readme: str) -> str:
    """Return README with its links as the site has them: pages of docs/ beside it, other files on GitHub."""
    other = re.sub(r"\]\((?!https?://|#|docs/)", f"]({_FILES}", readme)
    return other.replace("](docs/", "](").replace('src="docs/', 'src="')


def on_page_content(html: str, **kwargs: Any) -> str:
    """Remove the brackets of references, and the backticks and asterisks of types."""
    html = _REFERENCE.sub(r"<code>\1</code>", html)
    return _TYPE.sub(lambda found: f"<code>{re.sub(r'[`*]', '', found[1]).strip('[]')}</code>", html)
