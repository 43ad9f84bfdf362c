"""The check: run the documents in each mode, and make the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comparison import VISIBLE, Comparison
from ..compile import runs_compiled, uncompiled
from ..data.collator import DataCollatorForPacking
from ..errors import UnsupportedModel
from ..kernels.random_states import devices_of, random_states
from ..memory import return_freed_memory
from ..override import attributes_set
from ..parallel.zero3 import gradients_taken, whole_size
from ..patching.by_name import NAME, named_state, runs_by_name
from ..patching.inspect import max_positions, model_type
from ..patching.state import find_state
from ..versions import MINIMUM_VERSIONS, installed_version
from .compare import relative_difference
from .depth import layers_to_skip, skipping
from .documents import (
    LONG_ROWS,
    SCORED,
    SEVERAL_ROWS,
    SHAPES,
    SHORT,
    Documents,
    add_templates,
    alternating,
    draw_documents,
    draw_shapes,
    known_tokens,
    long_lengths,
    replacements,
)
from .engine import Compared, compare
from .isolation import Isolation, measure_control, measure_isolation
from .modes import without_random_numbers
from .probe import Collator, Probe, special_tokens, vocabulary_of
from .report import CheckReport
from .runs import Arrangement, dtype_of
from .subject import Subject, compute_dtype, device_of, rounding_dtype
from .unpadding import check_unpadding


def check(
    model: nn.Module,
    *,
    collator: Collator | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    processing_class: Any = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> CheckReport:
    """Measure whether packing is exact on this model, as it is now: backend, dtype, quantization, adapter.

    The model must be patched, or loaded with `attn_implementation="packfa"`. The check runs about six thousand tokens,
    in training mode without dropout, across both modes, and in evaluation mode by itself, too, if that computes
    something else. Modes, gradients, caches and random state are left as they were. Run it under the autocast that
    training will use.

    Args:
        model (`torch.nn.Module`):
            Such a causal LM, bare or wrapped. Under DeepSpeed ZeRO-3 its engine, between two steps.
        collator (`Callable`, *optional*):
            The collator of the training, [`DataCollatorForPacking`] by default.
        documents (`Sequence[Sequence[int]]`, *optional*):
            Token ids that the model knows, best from the training data. The check cuts its documents out of them.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer. Without documents the check tokenizes a text with it. Without both it draws random ids.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the check's random numbers.
        progress (`Callable`, *optional*):
            Called with the name of the next measurement and the share of the work that is done.

    Raises:
        [`UnsupportedModel`]: if the model is of neither kind, or its type is not served by name, if it gets padded
            batches only, or if its weights are split without ZeRO-3's engine.
    """
    state, collator = find_state(model), collator or DataCollatorForPacking()
    if state is None and not runs_by_name(model):
        raise UnsupportedModel(
            "the model is not patched.",
            do=f"Call trl_packfa.patch(model) first, or load it with attn_implementation='{NAME}'.",
        )
    state = named_state(model) if state is None else state
    if state.parts.padded_only:
        raise UnsupportedModel(
            f"{type(model).__name__} gets padded batches only.",
            why=["the check of packed rows compares logits of an LM head"],
            do="patch(model, unpad=True) has checked it; describe(model) shows the result.",
        )
    if isinstance(model, DistributedDataParallel):
        model = model.module  # it is the same on every rank, and gradients need not be shared here
    started = time.perf_counter()
    vocabulary = vocabulary_of(model)
    known = known_tokens(documents, processing_class, vocabulary)
    measured: list[CheckReport] = []
    # Prefixes change with the documents that are replaced, and rounding with them: `check_unpadding` measures them.
    alone = [] if state.unpadding is None else [(state.unpadding, "sharing", None)]
    with gradients_taken(model) as gradient_parts, torch.enable_grad(), attributes_set(alone):
        most = max_positions(state.parts.backbone)
        lengths = long_lengths(state.parts.windows, most, tiled=_has_tiles(device_of(model)))
        drawn = draw_documents(lengths, known, vocabulary, seed)
        add_templates(*drawn, special_tokens(model, vocabulary), seed)
        # Training mode first: some models run other kernels there, and only there activation checkpointing is on.
        with without_random_numbers(model, training=True):
            whole = Subject(model, state, gradient_parts, progress)
            # A few of the drawn documents, for the whole model.
            short = Probe(whole, collator, *([documents[i] for i in SHORT] for documents in drawn), seed=seed)
            draws = _draws_random_numbers(short)
            skipped = layers_to_skip(whole, partial(short.alone, 0))
            kinds = Subject(model, state, gradient_parts, progress, skipped)
            long = Probe(kinds, collator, *drawn, seed, scored=sum(SHAPES[SCORED], ()))
            if not draws:
                # If both modes give the same bits, a second measurement would only repeat the first.
                report, both = _measure(short, long, mode="training", both=True)
                measured.append(report)
        with without_random_numbers(model):
            # A mode that fails decides the verdict.
            if draws or (measured[0].is_exact and not both):
                measured.append(_measure(short, long, mode="evaluation", both=False, gradients=draws)[0])
    return_freed_memory()
    report = next((report for report in measured if not report.is_exact), measured[0])
    if not report["control"].holds:
        names = [name for name, p in model.named_parameters() if p.dim() > 1 and p.numel() and not bool(p.any())]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        zeros = f"; matrices of zeros: {', '.join(names[:3])}{more}" if names else ""
        report = report.with_rows([report["control"]._replace(where=zeros)])
    if state.unpadding is not None:
        report = report.with_rows(check_unpadding(model, documents=documents, seed=seed).rows)
    return replace(
        report,
        model_type=model_type(model),
        level=state.patch.level,
        backend=", ".join(sorted(set(state.backends.resolved.values()))) or "the model's own attention",
        training=_training(model),
        mode=" and ".join(found.mode for found in measured) + (" (training draws random numbers)" if draws else ""),
        tokens="known" if len(known) else "random",
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        versions={package: installed_version(package) or "" for package in ("trl-packfa", *MINIMUM_VERSIONS)},
    )


def _has_tiles(device: torch.device) -> bool:
    return device.type != "cpu"  # kernels of accelerators work in tiles of 64 to 128 tokens


def _measure(short: Probe, long: Probe, *, mode: str, both: bool, gradients: bool = True) -> tuple[CheckReport, bool]:
    """Measure in one mode: few documents through all layers, many through one layer of each kind.

    Without `gradients` documents are compared without a graph, as they are evaluated. With `both` isolation is
    measured across both modes, if the model computes the same in them. Return whether that is so, too: if not, the
    report is of this mode alone.
    """
    whole, kinds = short.subject, long.subject
    shapes = {name: long.arranged(rows) for name, rows in (SHAPES | draw_shapes(long.seed)).items()}
    trained = [long.row, long.arranged(LONG_ROWS)]
    with uncompiled(whole.model):  # compiled graphs would not call the hooks on the layers
        few = _compare_with_alone(short, [short.row], gradients=gradients)
        with skipping(kinds.skipped):
            many = _compare_with_alone(long, trained, shapes.values(), gradients=gradients)
    scale = float(torch.cat([own.states.float() for own in few.reference.values()]).std())
    whole.begin("whether documents see each other", 0.1)

    def isolations(*, both: bool) -> list[tuple[Isolation, Probe]]:
        options = {"scale": scale, "both": both}
        runs = replacements(len(short.lengths))
        found = [(measure_isolation(short, short.row, runs, few.noise, backward=True, **options), short)]
        if both and whole.anywhere(not found[0][0].forward <= 0):
            return found
        with skipping(kinds.skipped):
            # Gradients of one row were measured above, those of several rows are measured here; in other arrangements
            # they were compared with those of the documents alone. With experts each run needs a second one, which
            # explains how other tokens change the rounding of sums, so most arrangements are only compared.
            for shape in (*shapes.values(), long.row):
                number, is_rows = len(shape.documents), shape is shapes[SEVERAL_ROWS]
                if is_rows or shape is long.row:
                    runs = replacements(number)
                elif number > 1 and not kinds.regroups:
                    runs = alternating(number)
                elif both:
                    runs = [(False,) * number]
                else:
                    continue
                found.append((measure_isolation(long, shape, runs, many.noise, backward=is_rows, **options), long))
        return found

    isolated = isolations(both=both)
    if both and whole.anywhere(any(not found.forward <= 0 for found, _ in isolated)):  # a leak, or the modes differ
        isolated, both = isolations(both=False), False
    leaking, leaky = max(isolated, key=lambda item: item[0].forward)
    forward = max(few.forward, many.forward, key=lambda finding: finding.excess)
    parameters = [found.gradients for found in (few, many) if found.gradients is not None]
    gradient = max(parameters, key=lambda finding: finding.excess, default=None)
    leaked = [found.gradients for found, _ in isolated if found.gradients is not None]
    first = None
    for found, probe, tried in ((few, short, [short.row]), (many, long, [*trained, *shapes.values()])):
        # Ranks that hold parts of the model must all run the same forwards, whatever each of them has found.
        if whole.anywhere(not found.forward.excess <= 1):
            with skipping(probe.subject.skipped):
                first = _first_difference(probe, tried[found.where], found.forward.allowed) or found.first
            break
    leak = None
    if whole.anywhere(leaking.forward > 0):
        with skipping(leaky.subject.skipped):
            leak = _first_leak(leaky, leaking)
    runs = (few.reference, many.reference)
    dtype, rounding = (find(whole.model, dtype_of(few.reference)) for find in (compute_dtype, rounding_dtype))
    parity = forward._replace(where=first or forward.where)
    regrouped, unsteady = (max(getattr(found, name) for found, _ in isolated) for name in ("regrouped", "unsteady"))
    off = sum(not bool(values.isfinite().all()) for run in runs for own in run.values() for values in own.tensors)
    report = CheckReport(
        rows=(
            *([Comparison("finite", off, 0.0, of=str(dtype).removeprefix("torch."))] if off else []),
            Comparison("isolation", leaking.forward, 0.0, leak or "", max(regrouped, unsteady)),
            *([Comparison("steadiness", unsteady, math.inf, of=f"{unsteady:.1e}")] if unsteady else []),
            *([Comparison("input gradients", max(leaked), 0.0)] if leaked else []),
            parity,
            Comparison("labels", short.wrong_labels(), 0.0),
            *([] if gradient is None else [gradient]),
            Comparison("control", measure_control(short), VISIBLE),
        ),
        dtype=str(dtype).removeprefix("torch.") + (" with TF32 products" if dtype is not rounding else ""),
        lengths=long.lengths,
        layers=f"{len(kinds.parts.layers)} of {len(whole.parts.layers)}",
        mode=mode,
    )
    return report, both


def _compare_with_alone(
    probe: Probe, trained: Sequence[Arrangement], others: Iterable[Arrangement] = (), *, gradients: bool
) -> Compared:
    """Compare the documents in some arrangements with the documents alone.

    Those in `trained` hold all documents, and the gradient of every parameter is compared. In the others only the
    gradients of the embeddings are compared. `Compared.where` counts both, in this order. Without `gradients`
    all run under `torch.no_grad()`.
    """
    return compare(
        probe.subject,
        probe.run_alone,
        [partial(probe.run_packed, arrangement) for arrangement in trained],
        # Packed, not alone: that needs two runs instead of one for each document, and rounding is of equal size.
        rounding=partial(probe.run_packed, trained[-1]),
        others=[partial(probe.run_packed, arrangement, frozen=True) for arrangement in others],
        gradients=gradients,
    )


@torch.no_grad()
def _first_difference(probe: Probe, arrangement: Arrangement, allowed: float) -> str | None:
    """Return the first module whose packed output for a document differs from that of the document alone."""
    # No inputs are replaced here, so differences grow from layer to layer, and the first shows where they begin.
    packed = probe.outputs_in(arrangement, partial(probe.packed, arrangement))
    alone = [
        probe.outputs_in(Arrangement.of_one(i, probe.lengths[i]), partial(probe.alone, i))
        for i in arrangement.documents
    ]
    own = {name: [document[name][0] for document in alone if name in document] for name in packed}
    return _first_module(packed, own, allowed)


@torch.no_grad()
def _first_leak(probe: Probe, leak: Isolation) -> str | None:
    """Return the first module whose output for an unchanged document moves between the two runs of the leak."""
    tokens = (probe.replaced(leak.where.documents, replaced) for replaced in leak.which)
    runs = (probe.outputs_in(leak.where, partial(probe.packed, leak.where, own)) for own in tokens)
    stay = [one == other for one, other in zip(*leak.which, strict=True)]
    before, after = ({name: list(compress(outputs, stay)) for name, outputs in run.items()} for run in runs)
    return _first_module(before, after, 0.0)


def _first_module(found: dict[str, Documents], expected: dict[str, Documents], allowed: float) -> str | None:
    """Return the first module whose outputs for some document differ by more than is allowed."""
    for name, outputs in found.items():
        others = expected.get(name, [])
        same = [a.shape for a in outputs] == [b.shape for b in others]
        if same and any(not relative_difference(a, b) <= allowed for a, b in zip(outputs, others, strict=True)):
            return name
    return None


@torch.no_grad()
def _draws_random_numbers(probe: Probe) -> bool:
    """Tell whether running a document alone draws random numbers; some models do so for their gradients only."""
    # Two packed runs of such a model differ without any leak, so it is measured in evaluation mode.
    devices = devices_of(probe.model)
    before = random_states(devices)
    probe.alone(0)
    after = random_states(devices)
    return probe.subject.anywhere(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))


def _training(model: nn.Module) -> str:
    """Return in words which parameters train, and how."""
    trained = sum(whole_size(p) for p in model.parameters() if p.requires_grad)
    every = sum(map(whole_size, model.parameters()))
    adapters = sorted({config.peft_type.value for config in getattr(model, "peft_config", {}).values()})
    parts = [*adapters, "all parameters train" if trained == every else f"{trained} parameters train"]
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        parts.append("quantized")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        parts.append("gradient checkpointing")
    if runs_compiled(model):
        parts.append("compiled")
    return ", ".join(parts)
