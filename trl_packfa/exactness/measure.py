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
from .documents import LONG_ROWS, SHORT, SHORT_ROWS, Documents, draw_documents, known_tokens, long_lengths
from .isolation import first_leak, measure_control, measure_isolation
from .parity import first_difference, measure_long, measure_short
from .probe import Collator, Probe, device_of, vocabulary_of
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
                moved = measure_control(probe, 1.0, told=told)
            except PackingError:
                if told == ("position_ids",):
                    raise
                continue  # refused where positions have to restart, not ignored
            whole = measure_control(probe, 1.0)
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
        subject = Subject(model, state, gradient_parts, progress)
        # First as it trains: some models run other kernels in training mode, and checkpointing is on there only.
        with quiet(model, training=True):
            draws = _draws_random_numbers(subject, short)
            if not draws:
                found, trained = _measure(subject, short, long, mode="training")
                measured.append(found)
        with quiet(model):
            # To the bit: where both modes give the same logits, the second measurement would only repeat the first.
            if draws or subject.anywhere(largest(trained, _run(short)) != 0):
                measured.append(_measure(subject, short, long, mode="evaluation")[0])
    # The mode that fails speaks for both.
    report = next((report for report in measured if not report.is_exact), measured[0])
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
    """Documents for every measurement, and longer ones, more of them, for what these cannot show."""
    vocabulary, most = vocabulary_of(model), max_positions(find_backbone(model, state.patch))
    lengths = long_lengths(state.windows, most, tiled=_has_tiles(device_of(model)))
    tokens, others = draw_documents(lengths, known, vocabulary, seed)
    few, their_others = ([documents[i] for i in SHORT] for documents in (tokens, others))
    return (
        Probe(model, collator, few, their_others, SHORT_ROWS, seed),
        Probe(model, collator, tokens, others, LONG_ROWS, seed),
    )


def _has_tiles(device: torch.device) -> bool:
    """Whether attention runs there in tiles of 64 to 128 tokens, as the kernels of accelerators do."""
    return device.type != "cpu"


def _measure(subject: Subject, short: Probe, long: Probe, *, mode: str) -> tuple[ExactnessReport, Documents]:
    """Everything that is measured of a model in one mode, and the logits of the short documents packed."""
    with uncompiled(subject.model):  # compiled, a model would not see what follows its layers
        few = measure_short(subject, short)
        many = measure_long(subject, long, few)
    scale = float(torch.cat([logits.float() for logits in few.alone.logits]).std())
    subject.begin("whether short documents see each other", 0.24)
    # Gradients of the few short documents only: a dozen long ones need more runs, and backwards.
    row = measure_isolation(subject, short, few.noise, scale, rows=False, backward=True)
    rows = measure_isolation(subject, short, few.noise, scale, rows=True, backward=True)
    subject.begin("whether long documents see each other", 0.20)
    dozen = measure_isolation(subject, long, many.noise, scale, rows=False, backward=False)
    control = measure_control(short, scale)
    isolations = [(row, short, False), (dozen, long, False), (rows, short, True)]
    leaking, leaky, in_rows = max(isolations, key=lambda item: item[0].forward)
    forward = max(few.forward, many.forward, key=lambda finding: finding.excess)
    gradients = [found.gradients for found in (few, many) if found.gradients is not None]
    gradient = max(gradients, key=lambda finding: finding.excess, default=None)
    leaked = [found.gradients for found, *_ in isolations if found.gradients is not None]
    first = None
    for parity, probe in ((few, short), (many, long)):
        # Ranks that hold parts of the model must run the same forwards, whatever each of them found.
        if subject.anywhere(not parity.forward.excess <= 1):
            first = first_difference(probe, parity.forward.allowed) or parity.first
            break
    leak = None
    if subject.anywhere(leaking.forward > 0):
        leak = first_leak(leaky, leaking.which, rows=in_rows)
    report = ExactnessReport(
        dtype=_dtype_name(subject.model, few.alone.logits[0].dtype),
        lengths=long.lengths,
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
        loss=abs(short.loss(row.base) - short.loss_alone(row.base)),
        control=control,
        is_finite=all(bool(logits.isfinite().all()) for logits in many.alone.logits),
        first_leak=leak,
        mode=mode,
    )
    return report, row.base


@torch.no_grad()
def _draws_random_numbers(subject: Subject, probe: Probe) -> bool:
    """Whether a document alone draws from torch's random state: some models do for their gradients only."""
    # Two packed runs that draw anew differ without any leak, so such a model is measured in evaluation mode.
    devices = devices_of(subject.model)
    before = random_states(devices)
    probe.alone(0)
    after = random_states(devices)
    return subject.anywhere(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))


def _run(probe: Probe) -> Documents:
    """Logits of the packed documents."""
    return [logits.detach() for logits in probe.packed(probe.tokens)]


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
