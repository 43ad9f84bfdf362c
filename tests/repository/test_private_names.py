"""Every private name of another package that the code touches is a row of `trl_packfa/upstream.py`, and exists."""

import ast
import inspect
import itertools
import re
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name, walk_packages

import pytest
from packaging.requirements import Requirement

import trl_packfa
from trl_packfa.upstream import PRIVATE

ROOT = Path(__file__).parents[2]
SOURCES = {path.resolve() for folder in ("trl_packfa", "patches", "recipes") for path in (ROOT / folder).rglob("*.py")}
SOURCES -= {ROOT / "trl_packfa" / "upstream.py"}
# Not those that are ours wherever they lie, and not the public methods of named tuples.
NAME = re.compile(r"_(?!_|trl_packfa|replace\b|asdict\b|fields\b)\w+")
# Private names of our trainers that other files of ours read.
OURS = {"_add_noise", "_columns", "_config", "_data", "_require_check", "_rows", "_run_micro_batch", "_settle_tokens"}
# Methods of strings, and a function, whose arguments are parts of names.
OF_PARTS = {"startswith", "endswith", "removeprefix", "removesuffix", "sub"}
UPSTREAM = ("trl", "transformers", "accelerate", "peft", "datasets", "torch")


def spread(path):
    """Write a path with braces out: `a.{b,c}` is `a.b` and `a.c`."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


ROWS = [row._replace(path=path) for row in PRIVATE for path in spread(row.path)]


def is_self(node):
    named = node.func if isinstance(node, ast.Call) else node
    return isinstance(named, ast.Name) and named.id in ("self", "cls", "super")


@cache
def parsed():
    return [ast.parse(path.read_text()) for path in SOURCES]


@cache
def ours():
    """The names that the code defines: functions, classes, variables, and attributes of `self` that it sets."""
    names = set()
    for node in itertools.chain.from_iterable(map(ast.walk, parsed())):
        if isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.target, ast.Name):
            node.target.ctx = ast.Load()  # only declared
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def touched(tree, known):
    """Yield the names in a file that are public, or private and not `known`."""
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OF_PARTS)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant)
    }
    for node in ast.walk(tree):
        names, own = [], known
        if isinstance(node, ast.Attribute):
            names, own = [node.attr], known if is_self(node.value) else OURS
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            names = node.value.split(".") if re.fullmatch(r"[\w.]+", node.value) else []
        elif isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            names, own = [part for name in names for part in name.split(".")], set()
        yield from (name for name in names if not NAME.fullmatch(name) or name not in own)


LISTED = {part for row in ROWS for part in row.path.replace("()", "").split(".") if NAME.fullmatch(part)}


def unlisted(trees):
    """The private names of others that these files touch and no row lists."""
    return {name for tree in trees for name in touched(tree, ours()) if NAME.fullmatch(name)} - LISTED


def test_a_private_name_of_others_is_a_row_of_the_table():
    assert len(SOURCES) > 200 and not unlisted(parsed())


@pytest.mark.parametrize("code", [
    "trainer._planted", "getattr(x, '_planted', None)", "set_inside(x, _planted=1)", "from trl import _planted",
    "import torch._planted", "vars(x)['_planted']", "super()._planted()", "trainer._settle_late()",
])  # fmt: skip
def test_a_planted_private_name_is_found(code):
    assert unlisted([ast.parse(code)]) == set(re.findall("_planted|_settle_late", code))


@cache
def source(owner):
    """The source of a function or class, empty if it is not written in Python."""
    try:
        return inspect.cleandoc("\n" + inspect.getsource(owner))
    except (OSError, TypeError):
        return ""


@cache
def private_names(cls):
    """The private names that a class defines, and that its source touches on `self` and `super()`."""
    written = source(cls)
    names = {
        node.attr for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Attribute) and is_self(node.value)
    }
    names |= {name for name in vars(cls) if name in written}  # metaclasses add others
    return {name for name in names if NAME.fullmatch(name)}


def shared_with_bases(cls):
    """The private names of a class of ours that the classes of others below it have, too."""
    names = {True: set(), False: set()}
    for base in cls.__mro__:
        is_upstream = base.__module__.split(".")[0] in UPSTREAM
        names[is_upstream] |= private_names(base)
    return names[True] & names[False]


@cache
def inherited():
    """The private names that our classes share with the classes of others below them."""
    found = set()
    for module in walk_packages(trl_packfa.__path__, "trl_packfa."):
        # Not scripts and optional packages.
        if not re.match(r"trl_packfa\.(recipes|frameworks|__main__|kernels\.\w+\.triton_kernels?)", module.name):
            found |= {c for c in vars(import_module(module.name)).values() if inspect.isclass(c)}
    return {name for cls in found if cls.__module__.startswith("trl_packfa.") for name in shared_with_bases(cls)}


def test_a_class_of_ours_shares_only_listed_names_with_its_bases():
    assert {"_tag_names", "_metrics", "_prepare_dataset"} <= inherited() <= LISTED


def test_a_planted_override_is_found():
    class Planted(trl_packfa.PackedKTOTrainer):
        def _prepare_input(self, data):
            return self._num_updates, super()._get_eval_sampler(data)

    assert shared_with_bases(Planted) - shared_with_bases(trl_packfa.PackedKTOTrainer) == {"_get_eval_sampler"}


def test_a_row_of_the_table_is_used():
    used = inherited().union(*(touched(tree, set()) for tree in parsed()))
    ends = [row.path.rpartition(".")[2] for row in ROWS]
    assert not set(ends) - used and len({row.path for row in ROWS}) == len(ends) and "_planted" not in used


def exists(path):
    owner, _, name = path.rpartition(".")
    if owner.endswith("()"):
        found = resolve_name(owner[:-2])
        sources = map(source, inspect.getmro(found) if inspect.isclass(found) else [found])
        return any(re.search(rf"\b{name}\b", text) for text in sources)
    try:
        resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.versions
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_a_private_name_exists_in_the_installed_versions(row):
    only = Requirement(row.only) if row.only else None
    assert exists(row.path) == (only is None or only.specifier.contains(version(only.name)))


@pytest.mark.versions
@pytest.mark.parametrize("path", ["trl.SFTTrainer._planted", "trl.SFTTrainer()._planted", "torch._planted.x",
                                  "accelerate.hooks.add_hook_to_module()._planted"])  # fmt: skip
def test_a_planted_row_does_not_exist(path):
    assert not exists(path)
