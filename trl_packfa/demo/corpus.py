"""Questions and answers from the docstrings of the running Python's standard library.

Every machine has this text. Like instruction data, it is real, short and very uneven in length. Sources are parsed
with `ast`; nothing is imported or executed.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict

# These are generated, vendored or test Python itself. Nobody asks for their documentation.
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "pydoc_data", "turtledemo"}
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def docstring_dataset() -> DatasetDict:
    """Return shuffled prompt-completion pairs, split into `train` and `test`."""
    pairs = list(_pairs(Path(sysconfig.get_path("stdlib"))))
    return Dataset.from_list(pairs).shuffle(seed=0).train_test_split(test_size=0.05, seed=0)


def _pairs(root: Path) -> Iterator[dict[str, str]]:
    """Yield a question about every documented definition below `root` and its docstring, each text once."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED.isdisjoint(relative.parts):
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            for kind, name, text in _in_file(path):
                if text not in seen:
                    seen.add(text)
                    question = f"What does the {kind} {name} of Python's module {module} do?\n"
                    yield {"prompt": question, "completion": text}


def _in_file(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, docstring) of every documented definition."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):  # some templates and test data are not valid Python
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield ("class" if isinstance(node, ast.ClassDef) else "function"), node.name, text
