"""`trl-packfa`: the command line. Heavy imports happen inside the commands, so that `--help` is instant."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import __version__
from .errors import PackingError


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 refused or not exact, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    # bitsandbytes announces at import that an optional Hub kernel is missing; nothing here needs it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if argv[:1] == ["train"]:  # TRL's own parser reads everything that takes training arguments
        return _guarded(lambda: _train(argv[1:]), debug="--debug" in argv)
    if argv[:1] == ["bench"]:
        return _guarded(lambda: _bench(argv[1:]), debug="--debug" in argv)
    args = _parser().parse_args(argv)
    return _guarded(lambda: args.run(args), debug=args.debug)


def _guarded(command: Callable[[], int], *, debug: bool) -> int:
    try:
        return command()
    except PackingError as error:
        if debug:
            raise
        print(f"trl-packfa: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-packfa", description="Exact sequence packing for TRL.")
    parser.add_argument("--version", action="version", version=f"trl-packfa {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("train", help="packed fine-tune from a YAML file or flags (see: trl-packfa train --help)")
    _add_demo(commands)
    _add_check(commands)
    commands.add_parser("bench", help="packed and padded training side by side; also bench attention, pack, check")
    _add_models(commands)
    for name, run, text in (
        ("backends", _backends, "list the attention backends and what this machine lacks for each"),
        ("env", _env, "print what a bug report needs"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--json", action="store_true", help="machine-readable output")
        command.set_defaults(run=run)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser("demo", help="the main job from nothing: QLoRA, packed and proven, on a CPU")
    demo.add_argument("--model", help="name or path of a base model instead of the built-in one")
    demo.add_argument("--dataset", help="file or name of a dataset instead of Python's docstrings")
    demo.add_argument("--output-dir", type=Path, default=Path("demo-output"))
    demo.add_argument("--base-steps", type=int, default=80, help="optimizer steps of the built-in base model")
    demo.add_argument("--steps", type=int, default=60, help="optimizer steps of the QLoRA fine-tune")
    demo.add_argument("--batch-size", type=int, default=16, help="examples per micro-batch")
    demo.add_argument("--max-length", type=int, default=1024, help="longest document in tokens")
    demo.set_defaults(run=_demo)


def _add_check(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser("check", help="prove that packing is exact on a model")
    check.add_argument("model", help="name or path of a causal LM")
    check.add_argument("--adapter", help="name or path of a PEFT adapter to put on it")
    check.add_argument("--backend", default="auto", help="attention backend (default: auto)")
    check.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    check.add_argument("--seed", type=int, default=0, help="seed of the random tokens")
    check.add_argument("--json", action="store_true", help="machine-readable output")
    check.set_defaults(run=_check)


def _add_models(commands: argparse._SubParsersAction) -> None:
    models = commands.add_parser(
        "models", help="list every causal-LM type of transformers and what packing does there"
    )
    models.add_argument(
        "--run", dest="measure", action="store_true", help="build, patch and check every type, and write the results"
    )
    models.add_argument("--output", type=Path, help="results file of --run (default: the package's own)")
    models.add_argument("--jobs", type=int, default=2, help="processes of --run")
    models.add_argument("--markdown", action="store_true", help="print the README's table")
    models.add_argument("--json", action="store_true", help="machine-readable output")
    models.set_defaults(run=_models)


def _demo(args: argparse.Namespace) -> int:
    from .demo.run import DemoOptions, run_demo

    run_demo(
        DemoOptions(
            model=args.model,
            dataset=args.dataset,
            output_dir=args.output_dir,
            base_steps=args.base_steps,
            steps=args.steps,
            batch_size=args.batch_size,
            max_length=args.max_length,
        )
    )
    return 0


def _check(args: argparse.Namespace) -> int:
    from . import check, patch
    from .loading import load_causal_lm

    model = load_causal_lm(args.model, dtype=args.dtype, adapter=args.adapter)
    report = check(patch(model, backend=args.backend), seed=args.seed)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print_rows(report.rows(), as_json=False)
        print(f"{report}\n{report.seconds:.1f} s")
    return 0 if report.is_exact else 1


def _bench(argv: list[str]) -> int:
    from .bench.command import bench

    return bench(argv)


def _models(args: argparse.Namespace) -> int:
    from . import matrix
    from .results import RESULTS, results

    types = results()
    if args.measure:
        types = matrix.run(args.output or RESULTS, jobs=args.jobs, seen=_show_result)["types"]
    if args.markdown:
        print(matrix.markdown(types))
        return 0
    return _print_rows(matrix.rows(types), as_json=args.json)


def _show_result(name: str, result: Mapping[str, object]) -> None:
    print(f"{name}: {result['verdict']} {result.get('rung', '')}", file=sys.stderr)


def _backends(args: argparse.Namespace) -> int:
    import torch

    from .attention import BACKENDS, AttentionRequest

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda:0", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    request = AttentionRequest(torch.device(device), dtype, head_dim=128, num_heads=32, num_key_value_heads=8)
    if not args.json:
        print(f"for {request.describe()}")
    rows = [{"backend": b.name, "here": "; ".join(b.refusals(request)) or "yes", "what": b.summary} for b in BACKENDS]
    return _print_rows(rows, as_json=args.json)


def _env(args: argparse.Namespace) -> int:
    import platform

    import torch

    from .versions import MINIMUM_VERSIONS, installed_version

    packages = ["trl-packfa", *MINIMUM_VERSIONS, "bitsandbytes", "flash-attn", "kernels", "triton"]
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {package: installed_version(package) or "not installed" for package in packages}
    facts["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return _print_rows([{"what": k, "version": v} for k, v in facts.items()], as_json=args.json)


def _print_rows(rows: Sequence[Mapping[str, object]], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    # In a pipe there is no width to fit into.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return 0


def _train(argv: list[str]) -> int:
    from .launch import train

    return train([argument for argument in argv if argument != "--debug"])


if __name__ == "__main__":
    sys.exit(main())
