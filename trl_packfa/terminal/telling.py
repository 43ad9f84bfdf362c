"""Lines that a run prints for people who start it from Python: what packing saves, the verdict, the speed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import rich
from tqdm.auto import tqdm
from transformers import Trainer

from ..errors import figure
from ..packing import PackingReport
from .progress import RichProgressCallback, packing_table, plan_table


def tell(args: Any, line: str) -> None:
    """Print a line on the main process, above its bar; nothing with `disable_tqdm=True`."""
    if args.process_index == 0 and not args.disable_tqdm:
        tqdm.write(f"trl-packfa: {line}", file=sys.stderr)


@figure("line on the data")
def tell_data(trainer: Trainer, reports: Mapping[str, PackingReport], plan: Mapping[str, float]) -> None:
    """Tell what packing does to the data: a line, in a notebook the tables; nothing where a command shows them."""
    args = trainer.args
    commanded = any(isinstance(one, RichProgressCallback) for one in trainer.callback_handler.callbacks)
    report = reports.get("train")
    if commanded or report is None or not plan:
        return
    console = rich.get_console()
    if console.is_jupyter and args.process_index == 0 and not args.disable_tqdm:
        console.print(packing_table(reports))
        console.print(plan_table(plan))
        return
    lost = f", {report.tokens_lost / report.tokens:.1%} of all tokens cut or dropped" if report.tokens_lost else ""
    parts = [f"{report.packed_documents:,} documents of {report.packed_tokens:,} tokens{lost}",
             f"{plan['steps_per_epoch']:,.0f} steps an epoch"]  # fmt: skip
    if "padding_without_packing" in plan:
        parts.append(f"{plan['padding_without_packing']:.0%} of a padded run's places are padding; here none is")
    elif "fill" in plan:
        parts.append(f"rows are {plan['fill']:.0%} full")
    tell(args, "; ".join(parts))


def tell_end(args: Any, *, tokens: float, seconds: float, padding: float | None, said: str = "") -> None:
    """Tell what a run has trained and how fast, and what a padded run would have computed.

    `padding` is the share of padding among the places of the padded run, `None` if it is not known; `said` is more.
    """
    if not tokens or not seconds:
        return
    line = f"{tokens:,.0f} tokens trained in {seconds:,.0f} s, {tokens / seconds:,.0f} tokens/s"
    if padding:
        times = 1 / (1 - padding)
        line += f"; a padded run computes {tokens * times:,.0f} places, {times:.2f} times as many"
    tell(args, "; ".join(filter(None, (line, said))))
