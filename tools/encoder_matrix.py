"""Measure every encoder type with each of its heads: padded batches without their pads, beside the same padded rows.

`python tools/encoder_matrix.py` builds each type small, patches it with `unpad=True`, trains it two steps in its
trainer, and writes `patches/encoders.json`. The documentation's table is made from this file.
"""

from __future__ import annotations

import copy
import math
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from composite_matrix import differences, reason_of, rows_that_see_each_other
from support_matrix import rounded, run_types
from tiny_models.composites import padded
from tiny_models.encoders import encoder_types, heads_of, small_encoder
from trainer_runs import compare_head, off_by, twice_if_rounded

from trl_packfa import patch
from trl_packfa.errors import PackingError, UnsupportedModel
from trl_packfa.patches.measured import ENCODERS
from trl_packfa.patching.state import PatchState, find_state

_LENGTHS = (9, 3, 14, 1)
# Limits of a relative difference in float32, for outputs and for gradients.
_OUTPUTS, _GRADIENTS = 1e-4, 3e-4
# Rows that see each other move the outputs by more.
_CONTROL = 1e-2
# Seconds for one head; some types take minutes a forward even when they are small.
_LONGEST = 60

Results = tuple[torch.Tensor, dict[str, torch.Tensor]]


def measure_type(name: str) -> dict[str, Any]:
    """Measure all heads of one type, and return its entry for `encoders.json`."""
    found = {head: measure_head(name, head) for head in heads_of(name)}
    for head, result in found.items():
        if result["verdict"] == "exact":
            result["trainer"] = train_head(name, head)
    return found


def train_head(name: str, head: str) -> dict[str, Any]:
    """Train one type with one head in its trainer, with and without padding; return how far the runs are apart."""

    def train(dtype: torch.dtype) -> dict[str, Any]:
        model: Any = small_encoder(name, head)
        return off_by(lambda: compare_head(model.to(dtype).train(), head))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return twice_if_rounded(train)


def measure_head(name: str, head: str) -> dict[str, Any]:
    """Build, patch and compare one type with one head; return its result, also if it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _at_most(_LONGEST):
                return _measured(small_encoder(name, head))
        except UnsupportedModel as error:
            return {"verdict": "not built", "why": str(error).splitlines()[0]}
        except TimeoutError:
            return {"verdict": "not built", "why": f"it runs for more than {_LONGEST} seconds"}


def _measured(model: Any) -> dict[str, Any]:
    stock = copy.deepcopy(model)
    try:
        expected = run_padded(stock, padded_batch())
    except Exception as error:  # whatever the model's code raises
        return {"verdict": "not built", "why": f"its own code does not run padded texts: {_line(error)}"}
    try:
        patch(model, unpad=True)
    except PackingError as error:
        both = stock.config.is_encoder_decoder
        return {"verdict": "refused", "why": "it has an encoder and a decoder" if both else reason_of(error)}
    except TimeoutError:
        raise
    except Exception as error:  # record it as a result, so that the other types go on
        return {"verdict": "raises", "why": _line(error)}
    state = find_state(model)
    assert state is not None and state.unpadding is not None
    if state.unpadding_report["unpadding"].of == "alone":
        return {"verdict": "alone", "why": "its own padded rows see their pads; each text runs by itself"}
    worst = differences(run_padded(model, padded_batch()), expected)
    # Groups run only rows that begin with their first token.
    takes_left = state.unpadding.takes_left and state.patch.level != "groups"
    if takes_left:
        left = differences(run_padded(model, padded_batch(left=True)), run_padded(stock, padded_batch(left=True)))
        worst = {key: max(value, left[key]) for key, value in worst.items()}
    runs, calls = 1 + takes_left, state.unpadding.calls
    control = differences(_leaking(model, stock, state), expected)["logits"]
    exact = worst["logits"] <= _OUTPUTS and worst["gradients"] <= _GRADIENTS and control > _CONTROL
    if calls != runs:
        return {"verdict": "padded", "why": f"{calls} of {runs} padded batches ran without pads"}
    return {
        "verdict": "exact" if exact else "differs",
        "level": state.patch.level,
        "left pads": "without pads" if takes_left else "as they are",
        **rounded({"outputs": worst["logits"], "gradients": worst["gradients"], "control": control}),
        **_in_half_precision(stock, model),
    }


def _leaking(model: Any, stock: Any, state: PatchState) -> Results:
    """Run rows that see each other, for the control; rows of a group cannot, so there rows that see their pads."""
    if state.patch.level == "groups":
        batch = padded_batch()
        mask = torch.ones_like(batch["attention_mask"])
        outputs = outputs_of(stock, {**batch, "attention_mask": mask}, batch["attention_mask"])
        return outputs.detach(), {}
    with rows_that_see_each_other():
        return run_padded(model, padded_batch())


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:120]}"


def _in_half_precision(stock: Any, model: Any) -> dict[str, Any]:
    """Return how far bfloat16 outputs and gradients are from float64, without and with pads.

    Nothing if the stock model fails or is not finite (Splinter in float64), no gradients if its own are not finite.
    """
    batch = padded_batch()
    try:
        truth = run_padded(copy.deepcopy(stock).double(), batch)
        padded = run_padded(stock.bfloat16(), batch)
    except Exception:  # whatever the model's code raises in this precision
        return {}
    free = run_padded(model.bfloat16(), batch)
    found = {}
    for kind, part in (("", lambda run: {"outputs": run[0]}), (" gradients", lambda run: run[1])):
        with_pads, without = (_apart(part(run), part(truth)) for run in (padded, free))
        if math.isfinite(with_pads):
            found |= {f"bfloat16{kind}": without, f"padded{kind}": with_pads}
    return rounded(found)


def _apart(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all tensors together, as a share of the truth's norm."""
    pairs = [(found[name].double(), value) for name, value in truth.items()]
    size = sum(float(value.square().sum()) for _, value in pairs)
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs) / size) if size else math.nan


def padded_batch(*, left: bool = False) -> dict[str, torch.Tensor]:
    """Return padded rows of random token ids, and their mask."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in _LENGTHS]
    ids, mask = padded([[*row[:-1], 2] for row in drawn], left=left)  # T5 reads a row at its end-of-sequence token
    return {"input_ids": ids, "attention_mask": mask}


def outputs_of(model: Any, batch: Mapping[str, torch.Tensor], tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Return the head's outputs: those of each row, or those of each true token, by default those of the mask."""
    if type(model).__name__.endswith("ForMultipleChoice"):
        return model(**{name: value[:, None] for name, value in batch.items()}).logits
    outputs = model(**batch)
    if hasattr(outputs, "start_logits"):
        found = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    else:
        found = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
    found = found.where(found > -1e5, 0.0)  # BigBird takes 1e6 from the logits of a question
    tokens = batch["attention_mask"] if tokens is None else tokens
    return found[tokens.bool()] if found.dim() == 3 else found


def run_padded(model: Any, batch: Mapping[str, torch.Tensor]) -> Results:
    """Return the outputs and the gradients of a loss of all of them."""
    model.zero_grad()
    outputs = outputs_of(model, batch)
    outputs.sin().sum().backward()
    return outputs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in a block that runs longer."""

    def stop(*args: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Measure every type and write the results."""
    what = "build, patch and compare every encoder type with each of its heads"
    run_types(what, ENCODERS, encoder_types(), measure_type)


if __name__ == "__main__":
    main()
