"""Requirements of the model as it is built, adapted and patched; `run.trainer` holds it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn
from transformers.training_args import OptimizerNames

from ...config.requirements import Found, Requirement
from ...data.collator import LOSSES, ROW_LENGTHS
from ...errors import UnsupportedModel
from ...layout.shard import RowShard
from ...patching import inspect
from ...patching.state import find_state
from .training import Training, error_of

# Optimizers that keep their state in the weights' dtype.
_STATE_LIKE_WEIGHTS = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)


def _too_small_halves(run: Training) -> Any:
    halves = [name for name, p in run.model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    why, trainer = [], run.trainer
    if trainer.accelerator.scaler is not None:
        why += ["fp16=True scales the loss, and torch removes the scale from float32 gradients only"]
    own_optimizer = trainer.optimizer is not None or getattr(trainer, "optimizer_cls_and_kwargs", None) is not None
    # float16's smallest number is 6e-8, the square of 2.4e-4. Below it AdamW would divide by 0 plus epsilon.
    if run.optim in _STATE_LIKE_WEIGHTS and not own_optimizer:
        why += [
            f"optim='{OptimizerNames(run.optim).value}' keeps its state in float16, where the square of a "
            "gradient below 2e-4 is 0: steps become too large, or NaN"
        ]
    return halves and why and Found((len(halves), halves[0]), why)


def runs_by_document(model: nn.Module) -> bool:
    """Tell whether the backbone of a patched model runs document by document."""
    state = find_state(model)
    return state is not None and state.patch.level == "document"


def require_images(model: nn.Module) -> None:
    """Refuse a patched model that cannot run images without padding."""
    state = find_state(model)
    if state is None or state.parts.takes_images:
        return
    raise UnsupportedModel(
        f"{type(inspect.inner_model(model)).__name__} runs only text without its pads, and the trainer trains on "
        "images.",
        why=["the model finds the places of images in padded rows, or lets their tokens see each other in its mask"],
        do="Train it padded, by TRL's own trainer.",
    )


def _unshared(run: Training) -> Any:
    size, state = run.sequence_parallel, find_state(run.model)
    if size == 1 or state is None:
        return None
    heads = getattr(inspect.model_config(run.model).get_text_config(), "num_attention_heads", None)
    divisible = error_of(RowShard.require_divisible, heads, size) if isinstance(heads, int) else None
    return error_of(state.require_shareable, run.model, size) or divisible


def _gathered_unevenly(run: Training) -> Any:
    """Name the modules with sharded weights that run document by document.

    All ranks gather weights together, each time a module runs. Ranks with different documents would run such a module
    a different number of times, and would gather parts of different weights into one. A mixer, or a layer around it,
    is called once, so it may gather. The modules in a mixer run once for each group of documents, so they may not.
    """
    state = find_state(run.model)
    if state is None or run.trainer is None or not run.trainer.is_checked_wrapped:
        return None
    fsdp: Any = getattr(run.trainer.accelerator.state, "fsdp_plugin", None)
    policy = None if fsdp is None else fsdp2_prepare_auto_wrap_policy(fsdp, run.model)
    inside = {
        name: [part for part in mixer.modules() if part is not mixer] for name, mixer in state.parts.mixers.items()
    }
    # Under ZeRO-3 all modules gather; under FSDP2 layers, unless the `auto_wrap_policy` goes by size or names others.
    uneven = sorted(name for name, parts in inside.items()
                    if any(fsdp is None or (policy is not None and policy(part)) for part in parts))  # fmt: skip
    uneven = ["the backbone"] if state.patch.level == "document" else uneven
    named = ", ".join([*uneven[:3], *(["..."] if len(uneven) > 3 else [])])
    return uneven and ("DeepSpeed ZeRO-3" if fsdp is None else "FSDP2", named)


def _missing_source(run: Training) -> Any:
    if run.loss_by is None or (dataset := run.trainer.train_dataset) is None:
        return None
    columns = dataset.column_names or list(next(iter(dataset), {}))
    columns = [name for name in columns if name not in ("input_ids", "labels", ROW_LENGTHS, LOSSES)]
    return run.loss_by not in columns and Found(run.loss_by, [f"columns: {', '.join(columns)}"])


BUILT = (
    Requirement(_too_small_halves,
        "{found[0]} trained weights are in float16: {found[1]}, ...",
        why="AdamW keeps its state in the weights' dtype, and a scaled loss needs float32 gradients",
        do="Load the model with dtype='float32' or 'bfloat16', or train an adapter, which PEFT keeps in float32."),
    Requirement(lambda r: r.sequence_parallel > 1 and r.trainer.replaced("compute_loss"),
        "{found}, with sequence_parallel={r.sequence_parallel}.",
        why="no process has the logits of the whole row", do="Drop it, or sequence_parallel.",
        shown="an own compute_loss with sequence_parallel"),
    Requirement(_missing_source,
        "loss_by='{found}': the training dataset has no such column.", do="Name one of its columns."),
    Requirement(lambda r: r.plan.fills_rows and r.trainer.replaced("_get_train_sampler"),
        "packing_strategy='{r.packing_strategy}' has no use for a sampler: {found}.",
        why="documents are ordered so that they fill rows",
        do="Use packing_strategy='step' or 'minibatch', which keep the sampler's order."),
)  # fmt: skip

PATCHED = (
    Requirement(
        lambda r: r.is_sft and (r.trainer or r.args).neftune_noise_alpha is not None and runs_by_document(r.model)
        and inspect.model_type(r.model),
        "neftune_noise_alpha with model type '{found}', whose backbone runs document by document.",
        why="the range of NEFTune's noise depends on the length of the padded row, which is not known there",
        do="Drop neftune_noise_alpha, or train padded with packing=False.", error=UnsupportedModel),
    Requirement(_unshared,
        "sequence_parallel=... with mixers or ALiBi, or with attention heads that it does not divide.",
        why="they are computed from the whole row; each process attends with as many heads"),
    Requirement(_gathered_unevenly,
        "{found[0]} cannot run {found[1]} document by document.",
        why="it gathers weights each time they are used, but ranks would use them a different number of times",
        do="Use DDP or ZeRO-2.", shown="mixers that run document by document under FSDP2 or ZeRO-3"),
    Requirement(lambda r: r.images[1] and not r.packs_rows and error_of(require_images, r.model),
        "a model that runs only text without its pads, with images.", why="[measured](models.md)",
        do="Train it padded, by TRL's own trainer."),
)  # fmt: skip
