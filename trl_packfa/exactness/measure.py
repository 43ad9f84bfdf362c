"""The check: run the documents in each mode, and make the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comparison import TOLERANCES, VISIBLE, Comparison
from ..compile import runs_compiled, uncompiled
from ..data.collator import DataCollatorForPacking
from ..errors import UnsupportedModel
from ..kernels.random_states import devices_of, random_states
from ..memory import return_freed_memory
from ..override import attributes_set
from ..parallel.zero3 import gradients_taken, whole_size
from ..patching.apply import PatchState, find_state
from ..patching.inspect import find_backbone, max_positions, model_type
from ..patching.named_models import NAME, named_state, runs_by_name
from ..versions import MINIMUM_VERSIONS, installed_version
from .compare import largest
from .depth import layers_to_skip, skipping
from .documents import (
    LONG_ROWS,
    SCORED,
    SEVERAL_ROWS,
    SHAPES,
    SHORT,
    Documents,
    add_templates,
    draw_documents,
    draw_shapes,
    known_tokens,
    long_lengths,
)
from .isolation import Isolation, first_leak, forward, measure_control, measure_isolation
from .parity import first_difference, measure_parity
from .probe import Arrangement, Collator, Probe, dtype_of, special_tokens, vocabulary_of
from .quiet import quiet
from .report import ExactnessReport
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
) -> ExactnessReport:
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
    known = known_tokens(documents, processing_class, vocabulary_of(model))
    measured: list[ExactnessReport] = []
    # Prefixes change with the documents that are replaced, and rounding with them: `check_unpadding` measures them.
    alone = [] if state.unpadding is None else [(state.unpadding, "sharing", None)]
    with gradients_taken(model) as gradient_parts, torch.enable_grad(), attributes_set(alone):
        drawn = _draw(model, state, known, seed)
        # Training mode first: some models run other kernels there, and only there activation checkpointing is on.
        with quiet(model, training=True):
            whole = Subject(model, state, gradient_parts, progress)
            short = _short_probe(whole, collator, drawn, seed)
            drawn_before: list[bool] = []  # by each run of one document
            skipped = layers_to_skip(whole, lambda: drawn_before.append(_draws_random_numbers(short)))
            draws = drawn_before[0] if drawn_before else _draws_random_numbers(short)
            kinds = Subject(model, state, gradient_parts, progress, skipped)
            long = Probe(kinds, collator, *drawn, seed, scored=sum(SHAPES[SCORED], ()))
            if not draws:
                # If both modes give the same bits, a second measurement would only repeat the first.
                report, both = _measure(short, long, mode="training", both=True)
                measured.append(report)
        with quiet(model):
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


def _draw(model: nn.Module, state: PatchState, known: torch.Tensor, seed: int) -> tuple[Documents, Documents]:
    """Return the documents for every arrangement, and a replacement for each."""
    vocabulary, most = vocabulary_of(model), max_positions(find_backbone(model, state.patch))
    lengths = long_lengths(state.parts.windows, most, tiled=_has_tiles(device_of(model)))
    drawn = draw_documents(lengths, known, vocabulary, seed)
    add_templates(*drawn, special_tokens(model, vocabulary), seed)
    return drawn


def _short_probe(subject: Subject, collator: Collator, drawn: tuple[Documents, Documents], seed: int) -> Probe:
    """Return a probe with a few of the drawn documents, for the whole model."""
    return Probe(subject, collator, *([documents[i] for i in SHORT] for documents in drawn), seed=seed)


def _has_tiles(device: torch.device) -> bool:
    return device.type != "cpu"  # kernels of accelerators work in tiles of 64 to 128 tokens


def _measure(
    short: Probe, long: Probe, *, mode: str, both: bool, gradients: bool = True
) -> tuple[ExactnessReport, bool]:
    """Measure in one mode: few documents through all layers, many through one layer of each kind.

    Without `gradients` documents are compared without a graph, as they are evaluated. With `both` isolation is
    measured across both modes, if the model computes the same in them. Return whether that is so, too: if not, the
    report is of this mode alone.
    """
    whole, kinds = short.subject, long.subject
    shapes = [long.arranged(rows) for rows in (SHAPES | draw_shapes(long.seed)).values()]
    trained = [long.row, long.arranged(LONG_ROWS)]
    with uncompiled(whole.model):  # compiled graphs would not call the hooks on the layers
        few = measure_parity(short, [short.row], gradients=gradients)
        with skipping(kinds.skipped):
            many = measure_parity(long, trained, shapes, gradients=gradients)
    scale = float(torch.cat([own.output.float() for own in few.reference.values()]).std())
    whole.begin("whether documents see each other", 0.1)

    def in_whole_model(*, both: bool) -> Isolation:
        return measure_isolation(short, short.row, few.noise, scale, backward=True, both=both)

    def isolations(first: Isolation, *, both: bool) -> list[tuple[Isolation, Probe]]:
        found = [(first, short)]
        with skipping(kinds.skipped):
            # Gradients of one row were measured above, those of several rows are measured here; in other arrangements
            # they were compared with those of the documents alone. With experts each run needs a second one, which
            # explains how other tokens change the rounding of sums, so most arrangements are only compared.
            neighbours = [shape for shape in shapes if len(shape.documents) > 1 and not kinds.regroups]
            rows = long.arranged(SHAPES[SEVERAL_ROWS])
            for shape in (*neighbours, rows, long.row):
                options = {"backward": shape is rows, "pairs": shape in (rows, long.row), "both": both}
                found.append((measure_isolation(long, shape, many.noise, scale, **options), long))
        return found

    in_whole = in_whole_model(both=both)
    if both and whole.anywhere(not in_whole.forward <= 0):  # a leak, or the modes differ
        in_whole, both = in_whole_model(both=False), False
    isolated = isolations(in_whole, both=both)
    if both:
        with skipping(kinds.skipped):
            alone = [shape for shape in shapes if kinds.regroups or len(shape.documents) == 1]
            differs = any([_modes_differ(long, shape) for shape in alone])  # a list: every rank runs all of them
        if whole.anywhere(differs or any(not found.forward <= 0 for found, _ in isolated)):
            isolated, both = isolations(in_whole, both=False), False
    leaking, leaky = max(isolated, key=lambda item: item[0].forward)
    forward = max(few.forward, many.forward, key=lambda finding: finding.excess)
    parameters = [found.gradients for found in (few, many) if found.gradients is not None]
    gradient = max(parameters, key=lambda finding: finding.excess, default=None)
    leaked = [found.gradients for found, _ in isolated if found.gradients is not None]
    first = None
    for found, probe, tried in ((few, short, [short.row]), (many, long, [*trained, *shapes])):
        # Ranks that hold parts of the model must all run the same forwards, whatever each of them has found.
        if whole.anywhere(not found.forward.excess <= 1):
            with skipping(probe.subject.skipped):
                first = first_difference(probe, tried[found.where], found.forward.allowed) or found.first
            break
    leak = None
    if whole.anywhere(leaking.forward > 0):
        with skipping(leaky.subject.skipped):
            leak = first_leak(leaky, leaking)
    runs = (few.reference, many.reference)
    dtype, rounding = (find(whole.model, dtype_of(few.reference)) for find in (compute_dtype, rounding_dtype))
    parity = forward.named("parity", where=first or forward.where)
    regrouped, unsteady = (max(getattr(found, name) for found, _ in isolated) for name in ("regrouped", "unsteady"))
    off = sum(not bool(values.isfinite().all()) for run in runs for own in run.values() for values in own.tensors)
    report = ExactnessReport(
        rows=(
            *([Comparison("finite", off, 0.0, of=str(dtype).removeprefix("torch."))] if off else []),
            Comparison("isolation", leaking.forward, 0.0, leak or "", max(regrouped, unsteady)),
            *([Comparison("steadiness", unsteady, math.inf, of=f"{unsteady:.1e}")] if unsteady else []),
            *([Comparison("input gradients", max(leaked), 0.0)] if leaked else []),
            parity,
            Comparison("loss", short.loss_difference(), TOLERANCES[torch.float64].losses),
            *([] if gradient is None else [gradient]),
            Comparison("control", measure_control(short), VISIBLE),
        ),
        dtype=str(dtype).removeprefix("torch.") + (" with TF32 products" if dtype is not rounding else ""),
        lengths=long.lengths,
        layers=f"{len(kinds.parts.layers)} of {len(whole.parts.layers)}",
        mode=mode,
    )
    return report, both


@torch.no_grad()
def _draws_random_numbers(probe: Probe) -> bool:
    """Tell whether running a document alone draws random numbers; some models do so for their gradients only."""
    # Two packed runs of such a model differ without any leak, so it is measured in evaluation mode.
    devices = devices_of(probe.model)
    before = random_states(devices)
    probe.alone(0)
    after = random_states(devices)
    return probe.subject.anywhere(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))


def _modes_differ(probe: Probe, arrangement: Arrangement) -> bool:
    """Tell whether evaluation mode gives other bits than this mode in one arrangement."""
    now, evaluated = forward(probe, arrangement), forward(probe, arrangement, evaluated=True)
    return any(largest(now[i].tensors, own.tensors) != 0 for i, own in evaluated.items())


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
