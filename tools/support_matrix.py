"""Measure the patch level of every architecture: build each causal-LM type of transformers small, patch and check it.

`python tools/support_matrix.py` adds the installed transformers to `patches/models.json`. The documentation's table is
made from this file, and `patch` finds measured code in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from tiny_models import NOT_BUILDABLE, all_types, small_model

from trl_packfa import __version__
from trl_packfa.checking import CheckReport, check
from trl_packfa.data.collator import DataCollatorForPacking
from trl_packfa.errors import PackingError, UnsupportedModel
from trl_packfa.layout import PackedLayout
from trl_packfa.patches.measured import RESULTS, fingerprint, interface_fingerprint
from trl_packfa.patches.registry import get_patch
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target, model_type
from trl_packfa.patching.state import find_state
from trl_packfa.versions import installed_version

_LENGTHS = (13, 1, 29, 7)
# Limit of the relative error for an unpatched model with TRL's keys to be exact.
_UNPATCHED_EXACT = 1e-4


def measure_type(name: str) -> dict[str, Any]:
    """Build, patch and check one type; return its entry for `models.json`, also if the type fails."""
    if name in NOT_BUILDABLE:
        return {"verdict": "refused", "why": NOT_BUILDABLE[name]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = small_model(name)
        except Exception as error:  # for example, an older transformers with other names of sizes
            return {"verdict": "not built", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        found: dict[str, Any] = {"config_type": model_type(model), "source": fingerprint(model)}
        found["unpatched"] = _unpatched(model)
        try:
            apply_patch(Target.of(model), get_patch(model.config))
        except UnsupportedModel as error:
            return {**found, "verdict": "refused", "why": _REFUSED.get(name, str(error).splitlines()[0])}
        try:
            report = check(model)
        except Exception as error:  # record it as a result, so that the other types go on
            return {**found, "verdict": "raises", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        return {**found, **_summary(model, report)}


_REFUSED = {
    "cpmant": "puts prompt tokens before the row and attends to them in both directions: not causal under padding",
    "prophetnet": "predicts several tokens ahead with streams of its own: not causal under padding",
    "reformer": "sorts the row's tokens into buckets of similar hashes: not causal under padding",
}


def _summary(model: Any, report: CheckReport) -> dict[str, Any]:
    state = find_state(model)
    assert state is not None
    by_document = sorted({type(module).__name__ for module in state.parts.mixers.values()})
    return {
        "verdict": report.verdict if _keys_agree(model) else "depends on the keys",
        "level": report.level,
        "by_document": by_document,
        "isolation": report["isolation"].difference,
        "parity": float(f"{report['parity'].difference:.1e}"),
        "gradients": float(f"{report['gradients'].difference:.1e}") if "gradients" in report else None,
        "control": float(f"{report['control'].difference:.1e}"),
        "why": _WHY[report.level].format(modules=", ".join(by_document)),
    }


_WHY = {
    "attention": "attention rewritten for packed tokens",
    "interface": "attention through transformers' interface",
    "module": "by document unless its own kernels honour boundaries: {modules}",
    "document": "the whole backbone by document: it mixes tokens in ways that no single module contains",
}


def _batches() -> dict[str, dict[str, Any]]:
    """Return batches of the same documents, with their boundaries in every form that TRL and users send."""
    generator = torch.Generator().manual_seed(0)
    examples = [{"input_ids": torch.randint(3, 97, (n,), generator=generator).tolist()} for n in _LENGTHS]
    ours = DataCollatorForPacking()(examples)
    del ours["labels"]
    trl = {name: value for name, value in ours.items() if name != "packed_layout"}
    bare = {"input_ids": ours["input_ids"], "position_ids": ours["position_ids"]}
    ones = {"attention_mask": torch.ones(1, sum(_LENGTHS), dtype=torch.long)}
    return {
        "collator": ours,
        "TRL": trl,
        "position_ids": bare,
        "all-ones mask": {**trl, **ones},
        "use_cache": {**bare, "use_cache": True},
    }


@torch.no_grad()
def _keys_agree(model: Any) -> bool:
    logits = [model(**batch).logits for batch in _batches().values()]
    return all(torch.equal(logits[0], others) for others in logits[1:])


@torch.no_grad()
def _unpatched(model: Any) -> str:
    """Return the result of TRL's own keys without a patch: `exact`, `leaks`, `differs` or `raises`."""
    batch = _batches()["TRL"]
    layout = PackedLayout.from_lengths(_LENGTHS)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, : _LENGTHS[0]] = changed["input_ids"][0, : _LENGTHS[0]].flip(0)
    try:
        packed, moved = (layout.split(model(**b, use_cache=False).logits) for b in (batch, changed))
        alone = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in layout.split(batch["input_ids"])]
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError):
        return "raises"
    scale = float(torch.cat(alone).std())
    if max(float((a - b).abs().max()) for a, b in zip(packed[1:], moved[1:], strict=True)) / scale > _UNPATCHED_EXACT:
        return "leaks"
    parity = max(float((a - b).abs().max()) for a, b in zip(packed, alone, strict=True)) / scale
    return "exact" if parity <= _UNPATCHED_EXACT else "differs"


def in_processes(measure: Callable[[str], Any], names: Iterable[str], jobs: int) -> Iterator[tuple[str, Any]]:
    """Measure types in so many processes, each with one thread, and yield each type with its result."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quietly) as pool:
        futures = {pool.submit(measure, name): name for name in names}
        for future in as_completed(futures):
            yield futures[future], future.result()


def quietly() -> None:
    """Set up a process of the pool: one thread, and no warnings about missing kernels of each model."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def run(
    path: Path, *, jobs: int, seen: Callable[[str, dict[str, Any]], None], only: Iterable[str] = ()
) -> dict[str, Any]:
    """Measure every type under the installed transformers and merge the results into `path`.

    A run that was cut off is resumed from `path` with the suffix `.partial`. `seen` is called with each type and its
    result. `only` are types to measure again; all others must already be measured under the installed transformers.

    Raises:
        [`PackingError`]: with `only`, if the others are not measured under the installed transformers.
    """
    versions = versions_of("torch", "transformers")
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    partial = path.with_suffix(".partial")
    types = _begun(partial, versions)
    missing = [name for name in all_types() if name not in types]
    if only:
        if versions["transformers"] not in whole.get("transformers", ()):
            raise PackingError(
                f"{path} is of transformers {whole.get('transformers')}, here is {versions['transformers']}: one type "
                "alone would not fit the others.",
                do="Measure all types: remove --only.",
            )
        types, missing = {}, list(only)
    for name, result in in_processes(measure_type, missing, jobs):
        types[name] = result
        seen(name, result)
        write(partial, {"versions": versions, "types": types})
    whole = merged(whole, versions, types, interface=interface_fingerprint())
    write(path, whole)
    partial.unlink(missing_ok=True)
    return whole


def _begun(partial: Path, versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of an earlier run under the same versions that was cut off."""
    begun = json.loads(partial.read_text(encoding="utf-8")) if partial.exists() else {}
    return begun["types"] if begun.get("versions") == versions else {}


def merged(
    whole: Mapping[str, Any], versions: Mapping[str, Any], types: Mapping[str, Any], *, interface: str = ""
) -> dict[str, Any]:
    """Return the results file with the results of one more version of transformers in it.

    The result of a type is kept from the newest version. The fingerprints of its code are kept from every version with
    an exact result, so that a model is not checked again only because another version was measured later. If the level
    has changed, the other versions were measured with another patch, and their fingerprints are dropped.
    `interface` is the fingerprint of what all types rely on in this version.
    """
    this, newest = versions["transformers"], whole.get("versions", {}).get("transformers", "0")
    is_newest = Version(this) >= Version(newest)
    results = dict(whole.get("types", {}))
    for name, result in types.items():
        before = results.get(name, {})
        if is_newest and result["verdict"] == "exact" and before.get("level") not in (None, result.get("level")):
            before = {}  # other versions were measured with another patch
        sources = {**before.get("sources", {}), this: result.get("source")}
        if result["verdict"] != "exact":
            del sources[this]
        kept = result if is_newest or not before else before
        results[name] = {key: value for key, value in kept.items() if key != "source"} | {
            "sources": by_version(sources)
        }
    return {
        "versions": dict(versions) if is_newest else whole["versions"],
        "transformers": sorted({*whole.get("transformers", ()), this}, key=Version),
        "interfaces": by_version({**whole.get("interfaces", {}), this: interface}),
        "types": dict(sorted(results.items())),
    }


def by_version(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by version, the oldest version first."""
    return dict(sorted(values.items(), key=lambda item: Version(item[0])))


def versions_of(*packages: str) -> dict[str, str | None]:
    """Return the installed versions of these packages, and ours."""
    return {package: installed_version(package) for package in packages} | {"trl-packfa": __version__}


def rounded(values: Mapping[str, float]) -> dict[str, Any]:
    """Return measured differences with two digits."""
    return {name: float(f"{value:.1e}") for name, value in values.items()}


def write(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a results file whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def run_types(description: str, path: Path, names: Iterable[str], measure: Callable[[str], Any]) -> None:
    """Measure every type, or those of the command line, under the installed transformers, and write the results.

    The file is written after each type, as a run takes minutes.
    """
    args = parse_arguments(description, path)
    versions = versions_of("torch", "transformers")
    types = dict(json.loads(args.output.read_text(encoding="utf-8"))["types"]) if args.only else {}
    for name, result in in_processes(measure, args.only or names, args.jobs):
        types[name] = result
        print(name, result, file=sys.stderr, flush=True)
        write(args.output, {"versions": versions, "types": dict(sorted(types.items()))})


def parse_arguments(description: str, output: Path) -> argparse.Namespace:
    """Parse the arguments of a tool that measures types: `output`, `jobs` and `only`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=output, help="results file (default: the one of patches/)")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", nargs="+", default=(), metavar="TYPE", help="types to measure again (default: all)")
    return parser.parse_args()


def main() -> None:
    """Measure every type and write the results."""
    args = parse_arguments("build, patch and check every causal-LM type, and write the results", RESULTS)
    run(args.output, jobs=args.jobs, seen=_show, only=args.only)


def _show(name: str, result: Mapping[str, object]) -> None:
    print(f"{name}: {result['verdict']} {result.get('level', '')}", file=sys.stderr)


if __name__ == "__main__":
    main()
