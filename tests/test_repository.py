"""Rules of the house, kept by tests: which way imports point, what is public, what README says."""

import ast
import re
from pathlib import Path

import pytest
import tomllib
import yaml

import trl_packfa
from trl_packfa.attention import BACKENDS
from trl_packfa.errors import PackingError

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trl_packfa"
README = (ROOT / "README.md").read_text()

# Lower layers first; a module imports from its own layer and below.
LAYERS = [
    {"errors", "versions", "graphs", "precision", "quiet", "tables"},
    {"layout", "packing", "grouping", "tiles", "zoo", "zero3"},
    {"flight", "contradictions", "routing", "token_types"},
    {"attention", "boundaries", "collator", "declaration", "quantized", "rebatch"},
    {
        "overrides",
        "contents",
        "tokenized",
        "templates",
        "loading",
        "config",
        "batching",
        "drawing",
        "head",
        "arithmetic",
        "speed",
    },
    {"mixers", "lora", "elementwise", "finding"},
    {"patching"},
    {"patches"},
    {"adapters", "registry", "exactness", "results", "trust", "matrix"},
    {
        "card",
        "fused_head",
        "mishaps",
        "noise",
        "origins",
        "parallelism",
        "plain",
        "preflight",
        "preview",
        "progress",
        "ranks",
        "refusals",
        "reports",
        "resuming",
        "sampling",
        "sources",
        "steps",
        "streams",
        "summary",
        "weighting",
    },
    {"stepping"},
    {"feeding"},
    {"proving"},
    {"trainer"},
    {"launch", "demo", "bench", "plan", "merging"},
    {"commands"},
    {"cli", "__init__", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules():
    files = [p for p in PACKAGE.rglob("*.py") if not {"patches", "recipes"} & set(p.relative_to(PACKAGE).parts)]
    return files + list((ROOT / "patches").glob("*.py"))


def home(path):
    relative = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imports(path):
    """Names of trl_packfa's modules that a file imports, and the other packages."""
    inner, outer = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outer |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            name = node.module.split(".")
            (inner if name[0] == "trl_packfa" else outer).add(
                name[1] if name[0] == "trl_packfa" and name[1:] else name[0]
            )
        elif isinstance(node, ast.ImportFrom):
            depth = len(path.relative_to(PACKAGE).parts) - node.level
            if depth >= 1:
                inner.add(path.relative_to(PACKAGE).parts[0])
            elif node.module:
                inner.add(node.module.split(".")[0])
            else:
                inner |= {alias.name for alias in node.names}
    return inner, outer


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    inner, outer = imports(path)
    here = home(path)
    if here in ("__init__", "cli"):
        return
    for name in inner - {"trl_packfa", "__version__"}:
        assert LEVEL[name] <= LEVEL[here] or name in ("patches",), f"{here} imports {name}, which is above it"
    if here in ("attention", "packing") and path.name != "bridge.py":
        assert not outer & {"transformers", "trl", "peft", "datasets", "accelerate"}


def test_explicit_package_list_is_the_tree():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [p.parent for p in PACKAGE.rglob("__init__.py") if "patches" not in p.parts and "recipes" not in p.parts]
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(config["packages"]) == expected | {"trl_packfa.patches", "trl_packfa.recipes"}
    for name in ("patches", "recipes"):
        assert (PACKAGE / name).is_symlink() and (PACKAGE / name).resolve() == ROOT / name


def test_every_patch_file_is_listed():
    from trl_packfa.patches import PATCHES

    files = {p.stem for p in (ROOT / "patches").glob("*.py")} - {"__init__"}
    assert len(PATCHES) == len(files)


def test_public_names_are_frozen_and_load():
    assert trl_packfa.__all__ == [
        "AttentionArguments",
        "DataCollatorForPacking",
        "ExactnessReport",
        "PackedLayout",
        "PackedSFTConfig",
        "PackedSFTTrainer",
        "Patch",
        "check",
        "describe",
        "patch",
        "patched",
        "plot",
        "register",
        "registered",
        "unpatch",
    ]
    assert all(getattr(trl_packfa, name).__doc__ for name in trl_packfa.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trl_packfa.nothing  # noqa: B018


def test_files_fit_a_head():
    for path in [*modules(), *(ROOT / "tests").glob("*.py")]:
        lines = len(path.read_text().splitlines())
        assert lines <= (400 if "tests" in path.parts else 320), f"{path} has {lines} lines"


def test_everything_is_annotated():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                arguments = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
                missing = [a.arg for a in arguments if a.annotation is None]
                assert not missing and node.returns is not None, f"{path}:{node.lineno} {node.name} {missing}"


def test_numeric_tolerances_live_in_one_file():
    for path in (ROOT / "tests").glob("test_*.py"):
        found = re.findall(r"\b(?:atol|rtol)=", path.read_text())
        assert len(found) <= (2 if path.name == "test_trainer.py" else 0) or path.name == "test_repository.py", path


def table(title):
    """The first column of the first table on a page, and its rows."""
    section = (ROOT / "docs" / title).read_text().split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows}


def test_a_page_holds_the_generated_table_of_models():
    from trl_packfa.matrix import markdown
    from trl_packfa.results import results

    page = (ROOT / "docs" / "models.md").read_text()
    block = page.split("<!-- generated: trl-packfa models --markdown -->\n")[1].split("\n<!-- end -->")[0]
    assert block == markdown(results())
    exact = [result for result in results().values() if result["verdict"] == "exact"]
    assert f"Of the {len(results())} causal-LM types" in page and f"exact on {len(exact)}:" in page
    assert (
        f"Of the {len(results())} causal-LM types" in README and f"exact on {len(exact)}, unpatched on 109" in README
    )
    assert len(exact) >= 181 and not [r for r in results().values() if r["verdict"] not in ("exact", "refused")]


def test_a_page_holds_the_generated_table_of_adapters():
    from trl_packfa.adapters import table

    page = (ROOT / "docs" / "adapters.md").read_text()
    block = page.split("<!-- generated: trl-packfa models --adapters --markdown -->\n")[1].split("\n<!-- end -->")[0]
    assert block == table.markdown(table.results())


def test_none_that_is_exact_without_a_patch_drops_below_the_interface():
    from trl_packfa.results import results

    exact_today = {name: result for name, result in results().items() if result.get("unpatched") == "exact"}
    assert len(exact_today) == 109
    assert {result["level"] for result in exact_today.values()} <= {"attention", "interface"}


def test_the_results_know_every_type_of_the_installed_transformers():
    from trl_packfa.matrix import require_known
    from trl_packfa.results import results
    from trl_packfa.zoo import all_types

    require_known(results(), all_types())
    with pytest.raises(PackingError, match=r"1 causal-LM types that models\.json does not know: brand_new"):
        require_known(results(), [*all_types(), "brand_new"])


def test_a_page_lists_the_backends():
    rows = table("backends.md")
    assert {name: row[0] for name, row in rows.items()} == {b.name: b.summary for b in BACKENDS}


def test_readme_is_one_page():
    assert len(README.splitlines()) <= 200


def test_readme_links_resolve():
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_readme_python_parses_and_names_exist():
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "trl_packfa":
                for alias in node.names:
                    assert alias.name in trl_packfa.__all__


def test_makefile_and_readme_run_the_same_lines():
    makefile = (ROOT / "Makefile").read_text()
    for line in ("install torch==2.13.0", "install -e '.[tested,plots,dev]'", "trl-packfa demo", "pytest -n 2"):
        assert line in makefile and line in README


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_goes_through_the_real_parser(recipe, tmp_path):
    from trl import DatasetMixtureConfig, ScriptArguments, TrlParser

    from trl_packfa import PackedSFTConfig

    parser = TrlParser((ScriptArguments, PackedSFTConfig, DatasetMixtureConfig))
    argv = ["--config", str(recipe), "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    script, args, _ = parser.parse_args_and_config(args=argv)
    written = yaml.safe_load(recipe.read_text())
    for name, value in written.items():
        if name not in ("output_dir", "lora_target_modules") and hasattr(args, name):
            assert getattr(args, name) == value, name
    assert script.dataset_name == written["dataset_name"]


def test_nothing_of_the_workshop_is_left_behind():
    pattern = re.compile(r"\bTODO\b|\bFIXME\b|NotImplementedError")
    for path in modules():
        assert not pattern.search(path.read_text()), path
