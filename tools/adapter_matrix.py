"""Measure each kind of adapter under packing against each document alone in PEFT's own unpatched model.

It runs in training mode, in float64, on difficult documents: one of one token, equal lengths, more than eight
documents, one much longer than the others.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from adapter_kinds import INVOCATION, KINDS, REASONS, VOCABULARY, randomize
from support_matrix import rounded, versions_of, write
from torch import nn

from trl_packfa.adapters.table import EXACT, REFUSED, RESULTS, source_of, tuners
from trl_packfa.config.options import PatchOptions
from trl_packfa.data.collator import DataCollatorForPacking
from trl_packfa.patches.registry import get_patch
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target

_LENGTHS = (13, 1, 29, 7, 29, 90, 3, 11, 29, 19)
_CHANGED = 4
# (document, position) of the invocation tokens: at a document's end, at its start, twice; some documents have none.
_INVOKED = ((0, 4), (2, 0), (2, 20), (4, 5), (5, 30), (8, 26))
# Limit far above rounding, even of tuners that compute in float32, and far below any leak.
_MOST = 1e-4
# An adapter must change the logits at least this much. Otherwise it would be exact because it does nothing.
_LEAST_EFFECT = 1e-2
# Parameters with almost no gradient are compared with this share of the mean gradient.
_SMALL = 1e-2
# These tuners draw noise in training that depends on the shape, as dropout does. They are measured in eval mode.
_NOISY = ("lora monteclora_config", "pvera")


def measure_kind(kind: str) -> dict[str, Any]:
    """Measure a kind and return its row of `adapters.json`.

    A kind in `REASONS` is always refused.

    Raises:
        `AssertionError`: if another kind is not exact, or its adapter changes nothing.
    """
    try:
        found: dict[str, Any] = rounded(measure(KINDS[kind], noisy=kind in _NOISY))
    except ImportError:
        raise
    except Exception as error:  # an unsupported tuner may raise anything; the error is its result
        found = {"raises": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    exact = not found.get("raises") and max(found["logits"], found["gradients"]) <= _MOST and not found["isolation"]
    if exact and found["effect"] < _LEAST_EFFECT:
        raise AssertionError(f"{kind}: the adapter changes nothing: {found}")
    if kind in REASONS:
        return {"verdict": REFUSED, **found, "why": REASONS[kind][0], "do": REASONS[kind][1]}
    if not exact:
        raise AssertionError(f"{kind} is not exact, and REASONS has no reason for it: {found}")
    return {"verdict": EXACT, **found}


def measure(build: Callable[[], nn.Module], *, noisy: bool = False, **patching: Any) -> dict[str, float]:
    """Measure the errors of packed logits and gradients.

    Returns:
        `logits`, relative to their standard deviation; `gradients`, relative to each gradient; `isolation`, the change
        of logits by another document; `effect`, the change of logits by the adapter.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        docs = documents()
        with torch.no_grad():
            new = [_built(build)(input_ids=ids[None], use_cache=False).logits[0] for ids in docs[:1]]
        alone, expected = _run(_adapted(build, noisy), [{"input_ids": ids[None]} for ids in docs])
        # A new model, because some tuners keep state from their first batch.
        model = _adapted(build, noisy)
        target = Target.of(model)
        apply_patch(target, get_patch(target.inner.config), PatchOptions(**patching))
        packed, gradients = _run(model, [_batch(docs)])
        changed = [ids.flip(0) if number == _CHANGED else ids for number, ids in enumerate(docs)]
        moved, _ = _run(model, [_batch(changed)])
    scale = float(torch.cat(alone).std())
    others = [number for number in range(len(docs)) if number != _CHANGED]
    return {
        "logits": _largest(packed, alone) / scale,
        "gradients": _worst(gradients, expected),
        "isolation": _largest([moved[number] for number in others], [packed[number] for number in others]) / scale,
        "effect": _largest(alone[:1], new) / scale,
    }


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double().eval()


def _adapted(build: Callable[[], nn.Module], noisy: bool) -> nn.Module:
    model = _built(build)
    randomize(model)
    return model.train(not noisy)


def documents(*, seed: int = 0) -> list[torch.Tensor]:
    """Return documents of random token ids; some contain the invocation tokens of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    docs = [torch.randint(8, VOCABULARY, (length,), generator=generator) for length in _LENGTHS]
    for number, start in _INVOKED:
        docs[number][start : start + len(INVOCATION)] = torch.tensor(INVOCATION)
    return docs


def _batch(docs: Sequence[torch.Tensor]) -> dict[str, Any]:
    batch = DataCollatorForPacking()([{"input_ids": ids.tolist()} for ids in docs])
    del batch["labels"]
    return batch


def _run(model: nn.Module, batches: Sequence[dict[str, Any]]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the logits of each document and the gradients of their weighted sum, over one or several calls."""
    model.zero_grad(set_to_none=True)
    found: list[torch.Tensor] = []
    for batch in batches:
        logits = model(**batch, use_cache=False).logits[0]
        parts = [logits] if len(batches) > 1 else list(logits.split(list(_LENGTHS)))
        weighted = [(part * _weights(len(found) + number, part)).sum() for number, part in enumerate(parts)]
        torch.stack(weighted).sum().backward()
        found += [part.detach() for part in parts]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found, {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}


def _weights(number: int, logits: torch.Tensor) -> torch.Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(number), dtype=logits.dtype)


def _largest(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def _worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative difference of a gradient; infinite if other parameters have gradients."""
    if found.keys() != expected.keys() or not expected:
        return float("inf")
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    small = _SMALL * (sum(norm**2 for norm in norms.values()) / len(norms)) ** 0.5
    return max(float((found[name] - expected[name]).norm()) / max(norms[name], small) for name in expected)


def main() -> None:
    """Measure every kind and write the results."""
    parser = argparse.ArgumentParser(description="measure every tuner and variant of PEFT, and write the results")
    parser.add_argument("--output", type=Path, default=RESULTS, help="results file (default: the package's own)")
    path, rows = parser.parse_args().output, {}
    for kind in KINDS:
        rows[kind] = measure_kind(kind)
        print(f"{kind}: {rows[kind]['verdict']}", file=sys.stderr)
    sources = {tuner: source_of(tuner) for tuner in tuners()}
    write(path, {"versions": versions_of("peft", "torch", "transformers"), "sources": sources, "kinds": rows})


if __name__ == "__main__":
    main()
