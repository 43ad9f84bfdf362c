"""Measure every type with images or sounds: run its text decoder without pads, beside its own padded rows.

`python tools/composite_matrix.py` builds each type small, patches it with `unpad=True`, trains it two steps in
transformers' `Trainer` with `padding_free`, and writes `patches/composites.json`. The documentation's table is made
from this file.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from support_matrix import rounded, run_types
from tiny_models.composites import ImageBatch, composite_types, image_batch, small_composite
from tiny_models.encoders import drop_nothing
from trainer_runs import compare_images, off_by, twice_if_rounded

from trl_packfa import patch
from trl_packfa.errors import PackingError, UnsupportedModel
from trl_packfa.layout import PackedLayout
from trl_packfa.layout.padded_rows import PaddedRows
from trl_packfa.patches.measured import COMPOSITES
from trl_packfa.patching.inspect import text_decoder
from trl_packfa.patching.state import find_state

# Limits of a relative difference in float32, for logits and for gradients.
_LOGITS, _GRADIENTS = 1e-4, 3e-4
# A leak is larger.
_CONTROL = 1e-2


def measure_type(name: str) -> dict[str, Any]:
    """Measure one type, and return its entry for `composites.json`."""
    found = measure(name)
    return {**found, "trainer": train_type(name)} if found["verdict"] == "exact" else found


def train_type(name: str) -> dict[str, Any]:
    """Train one type on images or sounds, with and without padding; return how far the runs are apart."""
    return twice_if_rounded(partial(_train, name))


def _train(name: str, dtype: torch.dtype) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = small_composite(name)
        batch = image_batch(model)
        assert batch is not None, "it was measured with images"
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.inputs.items()}
        drop_nothing(model)
        if dtype == torch.float64:  # torch multiplies groups of experts in float32 and below
            model.set_experts_implementation("eager")
        return off_by(lambda: compare_images(model.to(dtype).train(), inputs))


def measure(name: str) -> dict[str, Any]:
    """Build, patch and compare one type; return the result, also if the type fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model: Any = small_composite(name)
        except UnsupportedModel as error:
            return {"verdict": "not built", "why": str(error).splitlines()[0]}
        decoder = text_decoder(model)
        if decoder is None:
            return {"verdict": "refused", "why": "it has no text decoder that is a model of its own"}
        found: dict[str, Any] = {"decoder": type(decoder).__name__}
        stock = copy.deepcopy(model)
        if raised := _raised_by_text(stock):
            return {**found, "verdict": "refused", "why": f"its own code runs no text without images: {raised}"}
        try:
            patch(model, unpad=True)
        except PackingError as error:
            return {**found, "verdict": "refused", "why": reason_of(error)}
        except Exception as error:  # record it as a result, so that the other types go on
            return {**found, "verdict": "raises", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        state = find_state(model)
        assert state is not None
        if not state.parts.takes_images:
            return {**found, "verdict": "text only", "why": "its decoder alone is not exact without pads"}
        found |= {"level": state.patch.level, "bidirectional": state.unpadding_report.bidirectional}
        try:
            # Some models' own left-padded rows see their pads.
            sides = (False, True) if state.unpadding_report["unpadding"].of == "padded" else (False,)
            counts_pads = "pads counted" in state.unpadding_report
            return {**found, **_with_images(stock, model, sides, counts_pads=counts_pads)}
        except PackingError as error:
            return {**found, "verdict": "text only", "why": reason_of(error)}


def _raised_by_text(model: Any) -> str | None:
    """Return what a model's own code raises on padded rows of text, `None` if it runs."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=ids.ne(0).long(), use_cache=False)
    except Exception as error:  # whatever the model's code raises
        return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
    return None


def reason_of(error: PackingError) -> str:
    """Return the first line of a refusal, or, where no general level was exact, what the last one showed."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    tried = [line for line in lines if line.startswith("level ")]
    return tried[-1] if tried else lines[0]


def _with_images(stock: Any, model: Any, sides: tuple[bool, ...], *, counts_pads: bool) -> dict[str, Any]:
    """Compare rows of images and text, padded on the right and on the left, with the same rows without their pads.

    With `counts_pads` the stock model would count positions from the pads on, and positions matter. The patched model
    counts them from the first token, as the patch's report says, so left-padded rows bring such positions.
    """
    batches = [image_batch(copy.deepcopy(stock), left=left) for left in sides]
    if batches[0] is None:
        return {"verdict": "exact", "images": "not tried: it takes pixels in a form of its own"}
    worst, made = {"logits": 0.0, "gradients": 0.0}, [batch for batch in batches if batch is not None]
    apart: dict[str, float] = {}
    for batch, left in zip(made, sides, strict=False):
        if left and counts_pads:
            batch.inputs["position_ids"] = (batch.inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        found = differences(_run(model, batch), _run(stock, batch))
        worst = {name: max(worst[name], value) for name, value in found.items()}
        apart[f"rows padded on the {'left' if left else 'right'}"] = found["logits"]
    with rows_that_see_each_other():
        control = differences(_run(model, made[0]), _run(stock, made[0]))["logits"]
    for reentrant in (False, True) if stock.supports_gradient_checkpointing else ():
        expected = _run(stock, made[0])
        if not _stock_takes_checkpoints(stock, made[0], expected, reentrant=reentrant):
            continue
        found = differences(_checkpointed(model, made[0], reentrant), expected)
        worst = {name: max(worst[name], value) for name, value in found.items()}
    exact = worst["logits"] <= _LOGITS and worst["gradients"] <= _GRADIENTS and control > _CONTROL
    measured = {"images": made[0].form, **rounded({**worst, "control": control})}
    if exact:
        return {"verdict": "exact", **measured}
    where = " and ".join(side for side, value in apart.items() if value > _LOGITS) or "some rows"
    why = f"with images, logits of {where} are {worst['logits']:.1e} away, gradients {worst['gradients']:.1e}"
    return {"verdict": "text only", **measured, "why": why}


def _run(model: Any, batch: ImageBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of true tokens, and the gradients of the loss."""
    model.zero_grad()
    outputs = model(**batch.inputs, use_cache=False)
    outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs.logits.detach()[batch.inputs["attention_mask"].bool()], gradients


def _stock_takes_checkpoints(
    stock: Any, batch: ImageBatch, expected: tuple[torch.Tensor, dict[str, torch.Tensor]], *, reentrant: bool
) -> bool:
    """Tell whether the stock model's gradients are right through checkpoints.

    Layers that share keys or an indexer's choice have wrong ones through reentrant checkpoints, or raise.
    """
    try:
        return differences(_checkpointed(stock, batch, reentrant), expected)["gradients"] <= _GRADIENTS
    except RuntimeError:
        return False


def _checkpointed(model: Any, batch: ImageBatch, reentrant: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    checkpointed = copy.deepcopy(model).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    return _run(checkpointed, batch)


def differences(
    found: tuple[torch.Tensor, dict[str, torch.Tensor]], expected: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Return the largest relative difference of logits, and of the gradient of a parameter."""
    scale = max(float(expected[1][name].norm()) for name in expected[1])
    gradients = [
        float((found[1][name] - own).norm() / own.norm().clamp(min=1e-3 * scale)) if name in found[1] else 1.0
        for name, own in expected[1].items()
    ]
    return {"logits": float((found[0] - expected[0]).abs().max() / expected[0].std()), "gradients": max(gradients)}


@contextmanager
def rows_that_see_each_other() -> Iterator[None]:
    """Lay all rows out as one document, for the control."""
    original = PaddedRows.layout
    PaddedRows.layout = lambda self, device: PackedLayout.from_lengths([self.num_tokens])  # type: ignore[method-assign]
    try:
        yield
    finally:
        PaddedRows.layout = original  # type: ignore[method-assign]


def main() -> None:
    """Measure every type and write the results."""
    what = "build, patch and compare every type with images or sounds"
    run_types(what, COMPOSITES, composite_types(), measure_type)


if __name__ == "__main__":
    main()
