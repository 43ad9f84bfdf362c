"""What README and the pages print for readers runs as it is printed, with small local models behind the Hub names."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tiny
import yaml
from snippets import DATASETS, run_shortened
from tiny_models import small_model
from training import lora_config, rows

from trl_packfa.cli.main import main
from trl_packfa.patches import registry

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("README.md")),
    ROOT / "CONTRIBUTING.md",
]
# Lines for a shell that install or start this very test suite; the Makefile and CI run those.
INSTALLS = ("pip ", "python3 -m venv", ".venv/bin/", "make ", "python -m pytest", "python -m pip")
EXTRA = {
    "train": "--output_dir out --use_cpu true --bf16 false --report_to none --disable_tqdm true".split(),
    "merge": ["--dtype", "float32"],
    "prepare": ["--eval_strategy", "no"],
}


def blocks(language):
    """Every fenced block of a language, with the page it is on."""
    for page in PAGES:
        found, inside = [], None
        for line in page.read_text().splitlines():
            if line.startswith("```"):
                if inside is None:
                    inside = (line[3:].strip(), [])
                    continue
                found.append(inside)
                inside = None
            elif inside is not None:
                inside[1].append(line)
        texts = ["\n".join(lines) for kind, lines in found if kind == language]
        yield from (pytest.param(text, id=f"{page.name}-{number}") for number, text in enumerate(texts))


def commands():
    """Every `trl-packfa` line in a block for a shell, optional arguments included."""
    for parameters in blocks(""):
        for line in parameters.values[0].replace("\\\n", "").splitlines():
            line = line.split("  #")[0].strip()
            # demo, plan and bench have tests of their own that run them.
            if line.startswith("trl-packfa ") and line.split()[1] not in ("demo", "plan", "bench"):
                yield pytest.param(line, id=line[:60])


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder in which the names that the pages use stand for something small."""
    monkeypatch.chdir(tmp_path)
    # The registry of patches is the process's own; what a snippet registers goes into a copy.
    table = dict(registry.registered_patches())
    monkeypatch.setattr(registry, "_table", lambda: table)
    model = small_model("qwen3", num_hidden_layers=2, intermediate_size=128)
    for folder in ("merged", "NAME_OR_PATH", "SmolLM2-135M-Instruct"):
        tiny.save(folder, model)
    Path("math").mkdir()
    for split, count in (("train", 40), ("test", 8)):
        Path("math", f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows(count)))
    alpaca = [{"instruction": tiny.words(4, seed=i), "input": "", "output": tiny.words(3, seed=-i)} for i in range(8)]
    Path("alpaca.jsonl").write_text("\n".join(map(json.dumps, alpaca)))
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": row["instruction"]}) for row in alpaca))
    rewards = "def brevity(completions, **others):\n    return [-len(text) for text in completions]\n"
    Path("my_rewards.py").write_text(rewards)
    return tmp_path


def save_adapter(folder):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    get_peft_model(AutoModelForCausalLM.from_pretrained("NAME_OR_PATH"), lora_config()).save_pretrained(folder)


@pytest.mark.parametrize("text", blocks("python"))
def test_every_python_snippet_runs(text, workplace, monkeypatch):
    if "load_in_4bit" in text:
        pytest.importorskip("bitsandbytes")
    run_shortened(text, workplace, monkeypatch)


def lines_of_data():
    """Every line of JSON of the data formats, with each trainer that its heading names."""
    for section in (ROOT / "docs" / "reference.md").read_text().split("\n### ")[1:]:
        heading = section.splitlines()[0]
        for block in re.findall(r"```json\n(.*?)```", section, flags=re.DOTALL):
            for number, line in enumerate(block.strip().splitlines()):
                for trainer in re.findall(r"--trainer (\w+)", heading):
                    yield pytest.param(trainer, line, id=f"{trainer}-{'-'.join(json.loads(line))}-{number}")


@pytest.mark.parametrize(("trainer", "line"), lines_of_data())
def test_every_line_of_data_trains(trainer, line, workplace, capsys):
    Path("data.jsonl").write_text("\n".join([line] * 8))
    argv = ["train", "--trainer", trainer, "--model_name_or_path", "NAME_OR_PATH", "--dataset_name", "data.jsonl"]
    if trainer in ("grpo", "rloo"):
        argv += "--reward_funcs my_rewards.brevity --num_generations 2 --per_device_train_batch_size 2".split()
        argv += ["--max_completion_length", "4"]
    if trainer == "kto":  # TRL's loss needs both labels in a batch
        other = {**json.loads(line), "label": not json.loads(line)["label"]}
        Path("data.jsonl").write_text("\n".join([line, json.dumps(other)] * 4))
    assert main([*argv, *EXTRA["train"], "--max_steps", "1"]) == 0
    assert "'train_loss'" in capsys.readouterr().out


@pytest.mark.parametrize("line", commands())
def test_every_command_runs(line, workplace, capsys):
    argv = shlex.split(line.replace("[", "").replace("]", ""))[1:]
    if argv[0] == "merge" and argv[1] == "out":
        save_adapter("out")
        argv[2] = "out/merged"
    if argv[0] == "check" and "--adapter" in argv:
        save_adapter("PATH")
        argv[argv.index("NAME")] = "sdpa"
    if "prompts.jsonl" in argv:
        argv[argv.index("--model_name_or_path") + 1] = "NAME_OR_PATH"
        argv += "--max_steps 1 --num_generations 2 --per_device_train_batch_size 2 --max_completion_length 4".split()
    if {"my_data.jsonl", "my_data", "alpaca.jsonl"} & set(argv):
        argv = stand_ins(argv, workplace)
    assert main([*argv, *EXTRA.get(argv[0], [])]) == 0
    assert capsys.readouterr().out


def stand_ins(argv, workplace):
    """Two steps of a recipe copied here, on data and a model that are here."""
    pytest.importorskip("bitsandbytes")
    recipe = argv[argv.index("--config") + 1]
    assert main(["recipes", "cp", Path(recipe).name]) == 0
    data = DATASETS[yaml.safe_load(Path(recipe).read_text())["dataset_name"]]
    (workplace / "my_data").mkdir()
    for name in ("my_data.jsonl", "my_data/train.jsonl", "my_data/test.jsonl"):
        (workplace / name).write_text("\n".join(map(json.dumps, data)))
    argv = [*("2" if word in ("50", "100") else word for word in argv), "--model_name_or_path", "NAME_OR_PATH"]
    argv += [] if "--max_steps" in argv else ["--max_steps", "2"]
    if "--resume_from_checkpoint" in argv:
        at = argv.index("--resume_from_checkpoint")
        assert main([*argv[:at], *argv[at + 2 :], "--save_steps", "1", *EXTRA["train"]]) == 0
    return argv


def test_lines_for_a_shell_are_installs_or_commands_that_are_tested():
    """Nothing is printed for a shell that no test knows."""
    known = ("trl-packfa ", "accelerate launch ", *INSTALLS)
    for parameters in blocks(""):
        lines = [line.strip() for line in parameters.values[0].replace("\\\n", "").splitlines() if line.strip()]
        if lines[0].startswith(known):
            assert all(line.startswith(known) for line in lines), lines


def test_every_accelerate_line_names_files_that_are_there():
    for page in [*PAGES, *(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes" / "launch").glob("*.yaml")]:
        for name in re.findall(r"(?:--config_file|--config) (recipes/\S+\.yaml)", page.read_text()):
            assert name.endswith("RECIPE.yaml") or (ROOT / name).exists(), f"{page.name}: {name}"


def anchors(page):
    """The anchors of a page's headings, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_between_pages_resolve():
    for page in PAGES:
        for name, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {name}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {name}#{anchor}"


def test_links_to_our_files_on_github_resolve():
    for page in PAGES:
        for name, anchor in re.findall(r"trl-packfa/blob/main/([^)#\s]+)(?:#([^)]+))?", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
            assert not anchor or anchor in anchors(ROOT / name), f"{page.name}: {name}#{anchor}"


def test_no_file_names_a_page_that_is_not_there():
    folders = ("trl_packfa", "patches", "recipes", "tools", "benchmarks", "tests")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.*")]:
        if path.suffix in (".py", ".md", ".yaml", ".sh", ".ipynb") and not path.is_symlink():
            for name in re.findall(r"\bdocs/(\w+\.md)", path.read_text()):
                assert (ROOT / "docs" / name).exists(), f"{path}: {name}"


def test_every_recipe_is_in_the_table():
    listed = (ROOT / "recipes" / "README.md").read_text()
    for path in (ROOT / "recipes").rglob("*"):
        if path.suffix in (".yaml", ".py", ".md") and path.name not in ("__init__.py", "README.md"):
            assert path.name in listed, path.name


def test_every_page_is_on_the_site_and_says_what_it_gives():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    sections = [next(iter(entry.values())) for entry in nav]
    listed = [page for section in sections for page in ([section] if isinstance(section, str) else section)]
    pages = {page.name: page.read_text().splitlines() for page in (ROOT / "docs").glob("*.md")}
    assert sorted(listed) == sorted([*pages, "index.md"])  # README, which tools/docs_hook.py puts there
    for name in pages:
        assert pages[name][2].startswith("What you get from this page: "), name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_page_is_read_in_five_minutes(page):
    """Generated tables are looked up, not read."""
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    prose = [line for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines() if line[:1] != "|"]
    assert len(text.split()) <= 1350 and len(" ".join(prose).split()) <= 900
