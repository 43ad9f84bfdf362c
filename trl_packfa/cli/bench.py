"""`trl-packfa bench`: packed and padded training side by side."""

from __future__ import annotations

from ..versions import require_versions

HELP = "packed and padded training side by side"


def run(argv: list[str]) -> int:
    """Run the benchmark with these flags and return the exit code: 0 done, 1 if a side failed."""
    require_versions()
    from ..bench.arguments import read_arguments
    from ..bench.run import run_bench
    from ..bench.table import heading, remarks, save_plot, speed_rows, training_rows
    from ..plotting import require_matplotlib
    from ..terminal import print_table
    from ..terminal.progress import quiet

    setup = read_arguments(argv)
    wanted = setup.bench
    if wanted.plot:
        require_matplotlib("--plot")  # before anything is measured
    with quiet():
        report = run_bench(setup)
    print(heading(report))
    print_table(speed_rows(report))
    print_table(training_rows(report))
    for line in remarks(report):
        print(f"! {line}")
    for side in report["sides"] if wanted.profile else []:
        print(f"{side['side']}, one step:")
        operations = side.get("operations", [])
        print_table([{"operation": name, "calls": calls, "own ms": ms} for name, calls, ms in operations])
    if wanted.plot:
        save_plot(report, wanted.plot)
    return int(any("failed" in side for side in report["sides"]))
