"""`trl-packfa recipes`: list the recipes of the package, or copy one to change it."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import recipes
from ..errors import InvalidConfig
from .output import Commands, add_json, print_rows

_FOLDER = Path(recipes.__file__).parent
_KINDS = (".yaml", ".py")


def add(commands: Commands) -> None:
    """Declare the command."""
    recipes = commands.add_parser("recipes", help="list the recipes, or copy one to change it")
    add_json(recipes)
    recipes.set_defaults(run=run)
    actions = recipes.add_subparsers(metavar="ACTION")
    copy = actions.add_parser("cp", help="copy a recipe out of the package; never overwrites")
    copy.add_argument("name", help="name as listed, e.g. qlora_llama3.yaml or launch/ddp_8gpu.yaml")
    copy.add_argument("folder", nargs="?", type=Path, default=Path("."), help="target folder (default: this one)")
    copy.set_defaults(run=run_copy)


def run(args: argparse.Namespace) -> int:
    """Print every recipe with the first sentence of its comment."""
    rows = [{"recipe": name, "what": _first_sentence(path)} for name, path in sorted(_all().items())]
    return print_rows(rows, as_json=args.json)


def _first_sentence(path: Path) -> str:
    """Return the first sentence of a recipe's comment or docstring, which may go over several lines."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        comment.append(line.strip('#" '))
        if comment[-1].endswith(".") or ". " in comment[-1] or not comment[-1]:
            break
    return " ".join(comment).strip().partition(". ")[0].removesuffix(".") + "."


def run_copy(args: argparse.Namespace) -> int:
    """Copy one recipe, never over a file, and print the command that runs it; refuse unknown names."""
    recipes = _all()
    found = [known for known in (args.name, f"{args.name}.yaml", f"{args.name}.py") if known in recipes]
    if not found:
        raise InvalidConfig(f"there is no recipe '{args.name}'.", do=f"Name one of {', '.join(sorted(recipes))}.")
    target = args.folder / Path(found[0]).name
    if target.exists():
        raise InvalidConfig(f"{target} already exists.", do="Remove it, or name another folder.")
    args.folder.mkdir(parents=True, exist_ok=True)
    target.write_text(recipes[found[0]].read_text(encoding="utf-8"), encoding="utf-8")
    runs = {".yaml": f"trl-packfa train --config {target}", ".py": f"python {target}"}
    if found[0].startswith("launch/"):
        runs[".yaml"] = f"accelerate launch --config_file {target} -m trl_packfa train --config RECIPE.yaml"
    print(f"{target}\n{runs.get(target.suffix, '')}".rstrip())
    return 0


def _all() -> dict[str, Path]:
    """Return every recipe of the package, keyed by its path inside the recipes folder."""
    found = [path for path in _FOLDER.rglob("*") if path.suffix in _KINDS and not path.name.startswith("__")]
    return {path.relative_to(_FOLDER).as_posix(): path for path in found}
