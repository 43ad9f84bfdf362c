"""The check: which documents are run, in which modes, and what the report says of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..collator import DataCollatorForPacking
from ..errors import PackingError, UnsupportedModel
from ..patching.apply import PatchState, find_state
from ..patching.inspect import find_backbone, max_positions, model_type
from ..patching.named_models import NAME, any_type_served, named_state, runs_by_name, trust
from ..runtime.compile import runs_compiled, uncompiled
from ..runtime.random_states import devices_of, random_states
from ..runtime.zero3 import gradients_taken, whole_size
from ..versions import MINIMUM_VERSIONS, installed_version
from .compare import largest
from .depth import layers_to_skip, skipping
from .documents import LONG_ROWS, SEVERAL_ROWS, SHAPES, SHORT, Documents, draw_documents, known_tokens, long_lengths
from .isolation import first_leak, measure_control, measure_isolation
from .parity import first_difference, measure_parity
from .probe import Collator, Probe, device_of, vocabulary_of
from .products import fast_half_products
from .quiet import quiet
from .report import ExactnessReport
from .subject import Subject, compute_dtype, rounding_dtype
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

    The model must be patched, or loaded with `attn_implementation="packfa"`, which is then trusted in this process if
    it is exact. It is measured in training mode, without dropout, and in evaluation mode where that
    computes something else. Runs some six thousand tokens forwards; modes, gradients, caches and random state are left
    as they were. Run it under the autocast that training will use.

    Args:
        model (`torch.nn.Module`):
            Such a causal LM, bare or wrapped; under DeepSpeed ZeRO-3 its engine, between two steps.
        collator (`Callable`, *optional*):
            What makes the batches of the training, [`DataCollatorForPacking`] by default.
        documents (`Sequence[Sequence[int]]`, *optional*):
            Token ids that the model knows, best of the training data: the check cuts its documents out of them.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer, where there are no documents: the check takes a text in its tokens. Random ids without both.
        seed (`int`, *optional*, defaults to `0`):
            Of what the check draws.
        progress (`Callable`, *optional*):
            Called with what is measured next and the share of the work that is done.

    Raises:
        [`UnsupportedModel`]: if the model is neither, or in parts without ZeRO-3's engine.
    """
    state = find_state(model)
    collator = collator or DataCollatorForPacking()
    if state is not None:
        return _check(model, state, collator, documents, processing_class, seed, progress)
    if not runs_by_name(model):
        raise UnsupportedModel(
            "the model is not patched.",
            do=f"Call trl_packfa.patch(model) first, or load it with attn_implementation='{NAME}'.",
        )
    with any_type_served():
        state = named_state(model)
        report = _check(model, state, collator, documents, processing_class, seed, progress)
        if report.is_exact:
            report = _told_in_part(model, state, collator, report)
    if report.is_exact:
        trust(model)
    return report


def _told_in_part(model: nn.Module, state: PatchState, collator: Collator, report: ExactnessReport) -> ExactnessReport:
    """The report of a model that runs by name: each way to tell of documents has to reach its attention by itself, as
    a model hands on what it knows and drops the rest without a word."""
    probe, _ = _probes(model, state, collator, torch.empty(0, dtype=torch.long), report.seed)
    for told in (("position_ids",), ("cu_seq_lens_q", "cu_seq_lens_k")):
        with quiet(model):
            try:
                moved = measure_control(probe, told=told)
            except PackingError:
                if told == ("position_ids",):
                    raise
                continue  # refused where positions have to restart, not ignored
            whole = measure_control(probe)
        # Ignored, they move as much as without boundaries; heeded, no more than rounding.
        if not moved < 0.1 * whole:
            return replace(report, isolation=moved, first_leak=f"the attention, which {told[0]} do not reach")
    return report


def _check(
    model: nn.Module,
    state: PatchState,
    collator: Collator,
    documents: Sequence[Sequence[int]] | None,
    processing_class: Any,
    seed: int,
    progress: Callable[[str, float], None] | None,
) -> ExactnessReport:
    """[`check`] of a model whose attention is known."""
    if isinstance(model, DistributedDataParallel):
        model = model.module  # the same on every rank; gradients need not be shared here
    started = time.perf_counter()
    known = known_tokens(documents, processing_class, vocabulary_of(model))
    measured: list[ExactnessReport] = []
    with gradients_taken(model) as gradient_parts, torch.enable_grad():
        short, long = _probes(model, state, collator, known, seed)
        whole = Subject(model, state, gradient_parts, progress)
        # First as it trains: some models run other kernels in training mode, and checkpointing is on there only.
        with quiet(model, training=True), fast_half_products(model):
            draws = _draws_random_numbers(whole, short)
            skipped = layers_to_skip(model, state, whole.parts.layers, lambda: _run_alone(short))
            kinds = Subject(model, state, gradient_parts, progress, skipped)
            if not draws:
                trained = _run(short)
                measured.append(_measure(whole, kinds, short, long, skipped, mode="training"))
        with quiet(model), fast_half_products(model):
            # To the bit: where both modes give the same, the second measurement would only repeat the first.
            if draws or whole.anywhere(largest(trained, _run(short)) != 0):
                measured.append(_measure(whole, kinds, short, long, skipped, mode="evaluation"))
    # The mode that fails speaks for both.
    report = next((report for report in measured if not report.is_exact), measured[0])
    if not report.has_power:
        report = replace(report, no_weight=_zeros(model))
    return replace(
        report,
        unpadding=None if state.unpadding is None else check_unpadding(model, documents=documents, seed=seed),
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


def _probes(
    model: nn.Module, state: PatchState, collator: Collator, known: torch.Tensor, seed: int
) -> tuple[Probe, Probe]:
    """A few documents for the whole model, and many for every arrangement."""
    vocabulary, most = vocabulary_of(model), max_positions(find_backbone(model, state.patch))
    lengths = long_lengths(state.windows, most, tiled=_has_tiles(device_of(model)))
    tokens, others = draw_documents(lengths, known, vocabulary, seed)
    few, their_others = ([documents[i] for i in SHORT] for documents in (tokens, others))
    return Probe(model, collator, few, their_others, seed), Probe(model, collator, tokens, others, seed, scored=False)


def _has_tiles(device: torch.device) -> bool:
    """Whether attention runs there in tiles of 64 to 128 tokens, as the kernels of accelerators do."""
    return device.type != "cpu"


def _measure(
    whole: Subject, kinds: Subject, short: Probe, long: Probe, skipped: dict[str, Any], *, mode: str
) -> ExactnessReport:
    """Everything that is measured of a model in one mode: a few documents through all of it, many documents in many
    arrangements through one layer of each kind."""
    shapes = [long.arranged(rows) for rows in SHAPES.values()]
    with uncompiled(whole.model):  # compiled, a model would not see what follows its layers
        few = measure_parity(whole, short, [short.row])
        with skipping(skipped):
            many = measure_parity(kinds, long, [long.row, long.arranged(LONG_ROWS)], shapes)
    scale = float(torch.cat([states.float() for states in few.alone.states.values()]).std())
    whole.begin("whether documents see each other", 0.1)
    isolations = [(measure_isolation(whole, short, short.row, few.noise, scale, backward=True), short, {})]
    with skipping(skipped):
        # Gradients of one row were measured above, those of several rows here; those of the other arrangements were
        # compared with the gradients of the documents alone. With experts, whose sums move with the tokens beside, a
        # run needs a second one that explains it: there that comparison has to do for most arrangements.
        neighbours = [shape for shape in shapes if len(shape.documents) > 1 and not kinds.regroups]
        rows = long.arranged(SHAPES[SEVERAL_ROWS])
        for shape in (*neighbours, rows, long.row):
            pairs, backward = shape in (rows, long.row), shape is rows
            found = measure_isolation(kinds, long, shape, many.noise, scale, backward=backward, pairs=pairs)
            isolations.append((found, long, skipped))
    leaking, leaky, left_out = max(isolations, key=lambda item: item[0].forward)
    forward = max(few.forward, many.forward, key=lambda finding: finding.excess)
    gradients = [found.gradients for found in (few, many) if found.gradients is not None]
    gradient = max(gradients, key=lambda finding: finding.excess, default=None)
    leaked = [found.gradients for found, *_ in isolations if found.gradients is not None]
    first = None
    for parity, probe, out in ((few, short, {}), (many, long, skipped)):
        # Ranks that hold parts of the model must run the same forwards, whatever each of them found.
        if whole.anywhere(not parity.forward.excess <= 1):
            with skipping(out):
                first = first_difference(probe, parity.where, parity.forward.allowed) or parity.first
            break
    leak = None
    if whole.anywhere(leaking.forward > 0):
        with skipping(left_out):
            leak = first_leak(leaky, leaking)
    return ExactnessReport(
        dtype=_dtype_name(whole.model, few.alone.dtype),
        lengths=long.lengths,
        layers=f"{len(kinds.parts.layers)} of {len(whole.parts.layers)}",
        isolation=leaking.forward,
        regrouped=max(found.regrouped for found, *_ in isolations),
        input_gradients=max(leaked, default=None),
        parity=forward.difference,
        threshold=forward.allowed,
        noise=forward.noise,
        first_difference=first,
        gradients=gradient and gradient.difference,
        gradient_threshold=gradient and gradient.allowed,
        gradient_noise=gradient and gradient.noise,
        first_gradient=None if gradient is None or gradient.excess <= 1 else gradient.where,
        loss=short.loss_difference(),
        control=measure_control(short),
        is_finite=all(
            bool(values.isfinite().all())
            for found in (few.alone, many.alone)
            for values in (*found.states.values(), *found.logits.values())
        ),
        first_leak=leak,
        mode=mode,
    )


def _zeros(model: nn.Module) -> str:
    """The names of some matrices of zeros, and how many there are."""
    names = [name for name, p in model.named_parameters() if p.dim() > 1 and p.numel() and not bool(p.any())]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@torch.no_grad()
def _draws_random_numbers(subject: Subject, probe: Probe) -> bool:
    """Whether a document alone draws from torch's random state: some models do for their gradients only."""
    # Two packed runs that draw anew differ without any leak, so such a model is measured in evaluation mode.
    devices = devices_of(subject.model)
    before = random_states(devices)
    probe.alone(0)
    after = random_states(devices)
    return subject.anywhere(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))


@torch.no_grad()
def _run(probe: Probe) -> Documents:
    """What goes into the LM head of the packed documents, and some of their logits."""
    outputs = probe.packed(probe.row)
    return [*outputs.states, *outputs.logits]


@torch.no_grad()
def _run_alone(probe: Probe) -> None:
    probe.alone(0)


def _dtype_name(model: nn.Module, logits: torch.dtype) -> str:
    """The dtype that the model computes in, in words."""
    found = [dtype(model, logits) for dtype in (compute_dtype, rounding_dtype)]
    return str(found[0]).removeprefix("torch.") + (" with TF32 products" if found[0] is not found[1] else "")


def _training(model: nn.Module) -> str:
    """What trains and how, in words."""
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
