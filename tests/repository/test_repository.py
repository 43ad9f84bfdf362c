"""Rules of the house, kept by tests: which way imports point, what is public, what README says."""

import ast
import json
import math
import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import margins
import pytest
import support_tables as tables
import tolerance
import tomllib
import torch
import yaml
from tiny_models import all_types
from tiny_models.encoders import encoder_types

import trl_packfa
from trl_packfa.adapters import table
from trl_packfa.attention import BACKENDS
from trl_packfa.patches import PATCHES
from trl_packfa.patches.measured import composites, encoders, results, training
from trl_packfa.scripts.parsing import make_parser
from trl_packfa.scripts.train import classes_of, kind_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_packfa"
README, CHANGELOG = ((ROOT / f"{name}.md").read_text() for name in ("README", "CHANGELOG"))
MODELS_PAGE = (ROOT / "docs" / "models.md").read_text()

# The floors of the house: a folder, or a file beside the folders, imports from those before it and from itself.
FLOORS = [
    "errors", "versions", "upstream", "comparison", "memory", "override", "compile", "autocast", "hub_kernel",
    "layout", "packing", "attention", "config", "parallel", "kernels", "patches", "patching", "adapters", "data",
    "checking", "candidates", "api", "register", "plotting", "terminal", "trainers.saving", "trainers.clock",
    "trainers.loading", "trainers.requirements", "trainers.settling",
    "trainers.packed_run", "trainers.padding_free", "trainers.sft", "trainers.preference", "trainers",
    "scripts", "frameworks", "plan", "bench", "demo", "package", "cli", "__main__",
]  # fmt: skip
FACE = ("package",)  # the public names of `trl_packfa`, which load any of the trainers
# Folders that know nothing of Hugging Face's libraries.
BARE = {"layout", "packing", "attention"}


def modules():
    files = [p for p in PACKAGE.rglob("*.py") if not {"patches", "recipes"} & set(p.relative_to(PACKAGE).parts)]
    return files + list((ROOT / "patches").glob("*.py"))


def name_of(path):
    """`("training", "config")` for trl_packfa/config/sft.py, `("attention",)` for a folder itself."""
    relative = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.relative_to(ROOT)
    return tuple(part for part in relative.with_suffix("").parts if part != "__init__")


NAMES = {name_of(path): path for path in modules()}


def imports(name):
    """Which modules of trl_packfa a module imports, at its top or later, and which other packages."""
    inner, outer = set(), set()
    for node in ast.walk(ast.parse(NAMES[name].read_text())):
        if isinstance(node, ast.Import):
            named = [tuple(alias.name.split(".")) for alias in node.names]
            outer |= {first for first, *_ in named if first != "trl_packfa"}
            inner |= {tuple(rest) or FACE for first, *rest in named if first == "trl_packfa"}
        if not isinstance(node, ast.ImportFrom):
            continue
        here = name if NAMES[name].name == "__init__.py" else name[:-1]
        base = here[: len(here) - node.level + 1] if node.level else ()
        found = (*base, *(node.module.split(".") if node.module else ()))
        if not node.level and found[0] != "trl_packfa":
            outer.add(found[0])
            continue
        found = found if node.level else found[1:]
        inner |= {(*found, alias.name) if (*found, alias.name) in NAMES else found or FACE for alias in node.names}
    return inner - {name}, outer


def floor(name):
    room = ".".join(name[:2])
    return FLOORS.index(room if room in FLOORS else name[0])


@pytest.mark.parametrize("name", [name for name in NAMES if name], ids=".".join)
def test_imports_point_down(name):
    inner, outer = imports(name)
    for other in inner:
        assert floor(other) <= floor(name), f"{name} imports {other}, which is above it"
    if name[0] in BARE:
        assert not outer & {"transformers", "trl", "peft", "datasets", "accelerate"}


def test_no_imports_go_in_a_circle():
    TopologicalSorter({name: imports(name)[0] - {FACE} for name in NAMES}).prepare()  # raises, with the circle
    with pytest.raises(CycleError):
        TopologicalSorter({"one": {"other"}, "other": {"one"}}).prepare()


def test_explicit_package_list_is_the_tree():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [p.parent for p in PACKAGE.rglob("__init__.py") if "patches" not in p.parts and "recipes" not in p.parts]
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(config["packages"]) == expected | {"trl_packfa.patches", "trl_packfa.recipes"}
    for name in ("patches", "recipes"):
        module = import_module(f"trl_packfa.{name}")
        assert module.__file__ is not None and Path(module.__file__).resolve() == ROOT / name / "__init__.py"


def test_no_links_are_committed():
    """Git on Windows and some zip tools make text files of them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True)
    modes = {line.split()[0] for line in listed.stdout.splitlines()}
    assert "100644" in modes and "120000" not in modes


def test_every_patch_file_is_listed():
    files = {p.stem for p in (ROOT / "patches").glob("*.py")} - {"__init__", "base", "registry", "measured"}
    assert len(PATCHES) == len(files)


def test_public_names_are_frozen_and_load():
    assert trl_packfa.__all__ == [
        "AttentionArguments", "CheckReport", "DataCollatorForPacking", "PackedDPOConfig", "PackedDPOTrainer",
        "PackedKTOConfig", "PackedKTOTrainer", "PackedLayout", "PackedRewardConfig", "PackedRewardTrainer",
        "PackedSFTConfig", "PackedSFTTrainer", "Patch", "check", "describe", "padding_free", "patch", "patched",
        "register_patch", "shard_batch", "unpatch",
    ]  # fmt: skip
    assert all(getattr(trl_packfa, name).__doc__ for name in trl_packfa.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trl_packfa.nothing  # noqa: B018


def test_files_fit_a_head():
    for path in [*modules(), *(ROOT / "tests").rglob("*.py")]:
        lines = len(path.read_text().splitlines())
        # The trainer is one class: a table of TRL's hooks, each of which hands over to a part.
        longest = 560 if path.name == "trainer.py" else 400
        assert lines <= longest, f"{path} has {lines} lines"


def test_numeric_tolerances_live_in_one_file():
    named = r"\b[ar]tol=|(?:\.assert_|all)close\(|assert_.*\b(?:allowed|places)=[0-9]"
    ad_hoc = rf"{named}|assert .*<=? *\(?[0-9.]+e-[0-9]+\b(?! \*)"
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ("tolerance.py", "test_repository.py"):
            assert not re.findall(ad_hoc, path.read_text()), path


@pytest.mark.parametrize("value", [0.5, 6.0, 400.0])
def test_a_bound_of_runs_is_in_last_places_of_the_value_and_grows_with_the_root_of_the_steps(value):
    place = torch.finfo(torch.float32).eps * max(1.0, value)
    steps = [[value, value] for _ in range(20)]
    by_rounding = [[value + 30 * place * (-1) ** i * (i + 1) ** 0.5, value] for i in range(20)]
    tolerance.assert_trajectory(by_rounding, steps)
    for step, moved in ((0, 70), (19, 300)):
        off = [[*figures] for figures in steps]
        off[step][0] += moved * place
        with pytest.raises(AssertionError, match="worst step"):
            tolerance.assert_trajectory(off, steps)
        with pytest.raises(AssertionError, match="the control's worst step"):
            tolerance.assert_another_run(off, steps)
    with pytest.raises(AssertionError, match="drift"):
        tolerance.assert_trajectory([value + 40 * place * i**0.5 for i in range(1, 21)], [value] * 20)
    with pytest.raises(AssertionError, match="worst step"):
        tolerance.assert_trajectory([math.nan], [value])
    tolerance.assert_another_run([1.01 * value] * 20, [value] * 20)


def test_margins_are_recorded_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("MARGINS", str(tmp_path / "native.jsonl"))
    tolerance.assert_rounding(tolerance.REGROUPED / 4)
    tolerance.assert_float32(torch.tensor([1.0 + 5e-6]), torch.tensor([1.0]))
    assert tolerance.differs(torch.tensor([1.0]), torch.tensor([2.0]))
    rows = [row.strip("| ").split(" | ") for row in margins.table(tmp_path)[2:]]
    assert [row[:3] for row in rows] == [["control", "1", "50"], ["float32", "1", "0.44"], ["regrouped", "1", "0.25"]]
    assert "test_margins_are_recorded_and_read" in rows[0][-1]


def test_a_page_holds_the_generated_table_of_models():
    assert tables.on_page("models", MODELS_PAGE) == tables.model_table(results())
    exact = [result for result in results().values() if result["verdict"] == "exact"]
    assert all(f"Of the {len(results())} causal-LM types" in page for page in (MODELS_PAGE, README))
    assert f"exact on {len(exact)}:" in MODELS_PAGE
    assert f"exact on {len(exact)}. Without our patch it is exact on 115." in " ".join(README.split())
    assert len(exact) >= 188 and not [r for r in results().values() if r["verdict"] not in ("exact", "refused")]


def test_a_page_holds_what_training_every_type_has_shown():
    types = training()["types"]
    assert tables.on_page("training", MODELS_PAGE) == tables.training_table(types)
    found = {(name, way): of["verdict"] for name, ways in types.items() for way, of in ways.items()}
    differs = {(name, way): types[name][way] for (name, way), verdict in found.items() if verdict == "differs"}
    # Its states are float32 in any model: in float64 the rest is more exact, and the norms are 18 times closer.
    assert differs.keys() == {("xlstm", "full")}
    assert all(of["float64"]["verdict"] == "same" for of in differs.values())
    assert {*found.values()} == {"same", "not trained by TRL", "differs"}


def test_a_page_holds_the_generated_table_of_types_with_images():
    types = composites()["types"]
    assert tables.on_page("images", MODELS_PAGE) == tables.composite_table(types)
    exact = [name for name, result in types.items() if result["verdict"] == "exact"]
    assert f"Of the {len(types)} types" in MODELS_PAGE and f"{len(exact)} are exact:" in MODELS_PAGE
    assert f"{len(exact)} types were measured exact" in CHANGELOG
    assert {result["verdict"] for result in types.values()} <= {"exact", "text only", "refused", "not built"}


def test_a_page_holds_the_generated_table_of_encoders():
    types = encoders()["types"]
    assert tables.on_page("encoders", MODELS_PAGE) == tables.encoder_table(types)
    assert set(types) == set(encoder_types())
    exact = [name for name, heads in types.items() for head in heads.values() if head["verdict"] == "exact"]
    assert f"{len(exact)}\n  heads of {len(set(exact))} types were measured exact" in CHANGELOG
    verdicts = {result["verdict"] for heads in types.values() for result in heads.values()}
    assert verdicts <= {"exact", "alone", "refused", "not built"}


def test_pages_hold_the_generated_tables_of_adapters_requirements_and_trainers():
    from padding_free import RESULTS, markdown

    assert tables.on_page("adapters", MODELS_PAGE) == tables.adapter_table(table.results())
    assert tables.on_page("requirements", (ROOT / "docs" / "reference.md").read_text()) == tables.requirement_table()
    page = (ROOT / "benchmarks" / "README.md").read_text()
    block = page.split("<!-- generated: benchmarks/padding_free.py --markdown -->\n")[1].split("\n<!-- end -->")[0]
    assert block == markdown(json.loads(RESULTS.read_text()))


def test_none_that_is_exact_without_a_patch_drops_below_the_interface():
    exact_today = {name: result for name, result in results().items() if result.get("unpatched") == "exact"}
    assert len(exact_today) == 115
    assert {result["level"] for result in exact_today.values()} <= {"attention", "interface"}


def test_the_results_know_every_type_of_the_installed_transformers():
    assert not set(all_types()) - results().keys(), "run python tools/support_matrix.py"


def test_the_printed_command_for_a_new_architecture_runs(capsys):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r'PYTHONPATH=tools python -c "(.*)"', page)
    exec(code, {})  # tools/ is on the path of the tests
    assert capsys.readouterr().out.startswith("exact: isolation 0.0e+00")


def test_a_page_lists_the_backends():
    section = (ROOT / "docs" / "hardware.md").read_text().split("\n## ")[0]
    rows = [line.strip("|").split("|")[:2] for line in section.splitlines() if line.startswith("|")][2:]
    assert {name.strip(" `"): summary.strip() for name, summary in rows} == {b.name: b.summary for b in BACKENDS}


def test_readmes_pictures_show_the_measured_figures(tmp_path):
    from draw_gains import GAINS, MASK, draw, gains

    folder = ROOT / "docs" / "images"
    picture = (folder / GAINS).read_text()
    for gain in gains():
        assert f">{gain.times}<" in picture and gain.times in README
        assert all(f">{value:.1f}<" in picture and f"{value:.1f}" in README for value in gain.memory)
    sides = json.loads((ROOT / "benchmarks" / "results" / "table2.json").read_text())["sides"]
    losses = {side["side"]: side["validation_loss"] for side in sides}
    assert losses["padding"] == losses["step"] and f"a held-out loss of {losses['step']:.4f}" in README
    pytest.importorskip("matplotlib")
    draw(tmp_path)
    for name in (GAINS, MASK):
        assert (folder / name).stat().st_size < 100_000
        drawn, committed = (re.findall(">[^<]+</text>", (of / name).read_text()) for of in (tmp_path, folder))
        assert drawn == committed


def test_readme_is_one_page_whose_links_resolve():
    assert len(README.splitlines()) <= 200
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_readme_python_parses_and_names_exist():
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "trl_packfa":
                for alias in node.names:
                    assert alias.name in trl_packfa.__all__


def test_tests_lie_in_folders_of_the_packages_names():
    """`repository` is about the files themselves, `whole` takes minutes a file; `test_gpu.py` runs where one is."""
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_gpu.py"}
    assert folders - {"repository", "whole"} <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}


def test_makefile_and_readme_run_the_same_lines():
    makefile = (ROOT / "Makefile").read_text()
    test = 'pytest -n 2 --ignore=tests/whole -m "not slow"'
    for line in ("install torch==2.13.0", "install -e '.[tested,plots,dev]'", "trl-packfa demo", test):
        assert line in makefile and line in README


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_goes_through_the_real_parser(recipe, tmp_path):
    argv = ["--config", str(recipe), "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    _, script, args, _ = make_parser(classes_of(kind_of(argv)), prog="trl-packfa train").parse_args_and_config(
        args=argv
    )
    written = yaml.safe_load(recipe.read_text())
    for name, value in written.items():
        if name not in ("output_dir", "lora_target_modules") and hasattr(args, name):
            assert getattr(args, name) == value, name
    assert script.dataset_name == written["dataset_name"]


def test_nothing_of_the_workshop_is_left_behind():
    pattern = re.compile(r"\bTODO\b|\bFIXME\b|NotImplementedError")
    for path in modules():
        assert not pattern.search(path.read_text()), path
