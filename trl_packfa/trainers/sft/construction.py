"""Settle a trainer's arguments, and refuse what packing cannot train, most of it before data or weights are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import is_liger_kernel_available
from trl import SFTConfig

from ...collator import LOSSES, ROW_LENGTHS
from ...errors import InvalidConfig, PackingError, UnsupportedModel
from ...layout.from_call import layout_of
from ...patching import inspect
from ..common.model_loading import named, output_dir
from ..common.parallelism import refuse_sharded_rows, refuse_uneven_calls, refuse_zero3, require_shareable
from ..common.preflight import require_run
from ..common.step_cutting import longest_of_stream
from ..common.validation import refuse_data, refuse_setup, refuse_untrainable, runs_by_document
from .config import PackedSFTConfig
from .images import image_column, without_packing
from .raw_dataset import TOKENS, prepares


def settle_arguments(
    model: str | PreTrainedModel | PeftModel, args: TrainingArguments | None, given: dict[str, Any]
) -> tuple[PackedSFTConfig, PackingError | None, str | None]:
    """Settle the config to train with: packed if possible, else padded if the user did not ask for packing.

    `given` are the trainer's other arguments, by name. Returns the config; the error that explains why the run is
    padded, if the user did not ask for that; and the strategy of a run on images, which computes padded micro-batches
    without their pads (`None` for other runs).

    Raises:
        [`PackingError`]: if the user asked for packing and it is not possible, or if the run cannot be trained at all.
    """

    def refuse(packed: PackedSFTConfig) -> None:
        if not packed.packing:
            return
        refuse_arguments(
            packed, compute_metrics=given["compute_metrics"], own_loss=given["compute_loss_func"] is not None
        )
        refuse_setup(packed, model, given["peft_config"], carries="document boundaries", batches="packed batches")
        refuse_sharded_rows(packed, own_loss="" if given["compute_loss_func"] is None else "compute_loss_func")
        for name, dataset in datasets:
            refuse_data(dataset, name=name)
        if packed.strategy.recuts_steps and isinstance(given["train_dataset"], IterableDataset):
            # Called only for its refusal, before weights are loaded. `StepCutter` calls it again.
            longest_of_stream(packed)
        refuse_collator(given["data_collator"])

    datasets = named(given["train_dataset"], given["eval_dataset"])
    refuse_untrainable(model, given["peft_config"])
    column = image_column(datasets)
    refusal = on_images = None
    if column is not None and (found := without_packing(args, output_dir(model), column)) is not None:
        settled, on_images = found
    else:
        settled, refusal = _settle(args, output_dir(model), refuse)
    makes_text = given["formatting_func"] is None and prepares(settled)
    require_run({"model": model, **given}, settled, makes_text=makes_text)
    return settled, refusal, on_images


def asks_for_packing(args: TrainingArguments | None) -> bool:
    """Tell whether the user asked for packing, by the config's class or a field. Then padding is no fallback."""
    fields = ("packing", "eval_packing", "padding_free")
    return isinstance(args, PackedSFTConfig) or any(getattr(args, name, False) for name in fields)


def _settle(
    args: TrainingArguments | None, output_dir: str, refuse: Callable[[PackedSFTConfig], None]
) -> tuple[PackedSFTConfig, PackingError | None]:
    """Return the config by the first strategy that `refuse` accepts; without one the padded config, and the error."""
    if asks_for_packing(args):
        _refuse_unenforced_length(args)
        settled = PackedSFTConfig.from_args(args)  # type: ignore[arg-type]  # it is not None here
        refuse(settled)
        return settled, None
    refusal: PackingError | None = None
    # `step` first, because it matches padded training. Where it is not possible (for example a stream of documents
    # without a length limit), each micro-batch becomes a row.
    for strategy in ("step", "minibatch"):
        try:
            settled = _plain(args, output_dir, packing_strategy=strategy)
            refuse(settled)
        except PackingError as error:
            refusal = refusal or error
        else:
            return settled, None
    return padded(args, output_dir), refusal


def _refuse_unenforced_length(args: TrainingArguments | None) -> None:
    """Refuse a plain `SFTConfig` that TRL refuses too: `padding_free=True` without packing, but with `max_length`."""
    if not isinstance(args, SFTConfig) or isinstance(args, PackedSFTConfig):
        return
    if args.padding_free and not args.packing and args.max_length is not None:
        raise InvalidConfig(
            f"padding_free=True without packing, and max_length={args.max_length}.",
            why=["TRL does not enforce max_length then, and refuses this combination"],
            do="Pass packing=True, max_length=None, or a PackedSFTConfig, which cuts documents and counts it.",
        )


def padded(args: TrainingArguments | None, output_dir: str) -> PackedSFTConfig:
    """Return the config of the padded run that TRL would train for these arguments."""
    return _plain(args, output_dir, packing=False, use_peft=False)


def _plain(args: TrainingArguments | None, output_dir: str, **changes: Any) -> PackedSFTConfig:
    return PackedSFTConfig(output_dir, **changes) if args is None else PackedSFTConfig.from_args(args, **changes)


# Largest relative difference between two losses that rounding can explain.
_SAME_LOSS = 1e-4


def refuse_arguments(args: PackedSFTConfig, *, compute_metrics: Callable[..., Any] | None, own_loss: bool) -> None:
    """Refuse trainer arguments that contradict packing."""
    if args.loss_weighting == "example" and own_loss:
        raise InvalidConfig(
            "compute_loss_func with loss_weighting='example': the function makes the loss itself.",
            do="Weight the examples in the function, or drop one of the two.",
        )
    if compute_metrics is not None and args.eval_packing:
        raise InvalidConfig(
            "compute_metrics with eval_packing=True: metrics are computed example by example.",
            why=["a packed batch has one row of logits for many examples"],
            do="Leave eval_packing unset. Then evaluation is padded and training stays packed.",
        )
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise InvalidConfig(
            "use_liger_kernel=True, but liger-kernel is not installed.",
            do="pip install 'trl-packfa[kernels]'. Then drop use_liger_kernel: on CUDA, packed calls use Liger's "
            "kernels without it.",
        )
    if getattr(args.deepspeed_plugin, "zero_stage", 0) == 3:
        refuse_zero3(args)


def refuse_collator(collator: Callable[[list[Any]], dict[str, Any]] | None) -> None:
    """Refuse a data collator whose batches do not mark where documents begin. It is tried on two small documents."""
    if collator is None:
        return
    why = "it returns neither position_ids that restart nor cu_seq_lens_q"
    try:
        batch = collator([{"input_ids": ids, "labels": list(ids)} for ids in ([1, 2, 3], [4, 5])])
        layout = layout_of(batch)
        # A third document may be padding.
        if layout is not None and layout.lengths[:2] == (3, 2):
            return
    except (PackingError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        why = f"it failed on two tokenized documents: {error!r}"
    raise InvalidConfig(
        f"data_collator {type(collator).__name__} does not carry document boundaries.",
        why=[why],
        do="Leave data_collator unset, use trl_packfa.DataCollatorForPacking, or train padded with packing=False.",
    )


def refuse_loss_function(loss_func: Any, *, vocabulary: int, device: torch.device) -> None:
    """Refuse a loss function whose loss of two small documents, on random logits, differs if they are packed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 5, vocabulary), generator=generator).to(device)
    labels = torch.tensor([[2, 1, 0, 1, 2], [1, 2, 1, -100, -100]], device=device)
    packed_logits = torch.cat([logits[:1], logits[1:, :3]], dim=1)
    packed_labels = torch.tensor([[-100, 1, 0, 1, 2, -100, 2, 1]], device=device)  # the collator masks first tokens
    batches = ((logits, labels), (packed_logits, packed_labels))
    # 6 labels are trained. A function that divides by its own count of labels agrees at 6 by chance, but not at 60.
    counts = [torch.tensor(count, device=device) for count in (6, 60)]
    why = next(filter(None, (_unlike(loss_func, batches, count) for count in counts)), None)
    if why is not None:
        raise InvalidConfig(
            f"compute_loss_func {getattr(loss_func, '__name__', type(loss_func).__name__)} cannot be packed.",
            why=[why],
            do="Shift the labels, sum the loss over labels that are not -100 and divide by num_items_in_batch, or "
            "train padded with packing=False.",
        )


def _unlike(loss_func: Any, batches: tuple[tuple[torch.Tensor, torch.Tensor], ...], count: torch.Tensor) -> str | None:
    """Describe how the padded and the packed loss of the same documents differ; return `None` if they agree."""
    try:
        padded, packed = (
            float(loss_func(CausalLMOutputWithPast(logits=logits), labels.clone(), num_items_in_batch=count))
            for logits, labels in batches
        )
    except Exception as error:  # a user's function can raise anything; then nothing shows that packing is right
        return f"it failed on logits and labels of two documents: {error!r}"
    if abs(padded - packed) <= _SAME_LOSS * max(abs(padded), 1.0):
        return None
    return f"its loss of two documents is {padded:.4f} padded, {packed:.4f} packed"


def refuse_own_sampler(args: PackedSFTConfig, what: str) -> None:
    """Refuse a user's own sampler, `what`, where rows are filled in the packer's order."""
    if args.strategy.fills_rows and what:
        raise InvalidConfig(
            f"packing_strategy='{args.packing_strategy}' has no use for a sampler: {what}.",
            why=["documents are ordered so that they fill rows"],
            do="Use packing_strategy='step' or 'minibatch', which keep the sampler's order.",
        )


def refuse_once_patched(trainer: Any) -> None:
    """Refuse what is known only once the trainer's model is built and patched."""
    args, model = trainer.args, trainer.model
    if trainer.compute_loss_func is not None:
        vocabulary = inspect.model_config(model).get_text_config().vocab_size
        refuse_loss_function(trainer.compute_loss_func, vocabulary=vocabulary, device=args.device)
    if trainer.neftune_noise_alpha is not None and runs_by_document(model):
        raise UnsupportedModel(
            f"neftune_noise_alpha with model type '{inspect.model_type(model)}', whose backbone runs document by "
            "document.",
            why=["the range of NEFTune's noise depends on the length of the padded row, which is not known there"],
            do="Drop neftune_noise_alpha, or train padded with packing=False.",
        )
    require_shareable(model, args)
    if trainer.is_proven_wrapped:
        refuse_uneven_calls(model, getattr(trainer.accelerator.state, "fsdp_plugin", None))
    refuse_sources(args, trainer.train_dataset)


def refuse_sources(args: PackedSFTConfig, train_dataset: Dataset | IterableDataset | None) -> None:
    """Refuse a `loss_by` column that does not exist or that holds tokens."""
    if args.loss_by is None or train_dataset is None:
        return
    columns = train_dataset.column_names or list(next(iter(train_dataset), {}))
    columns = [name for name in columns if name not in (*TOKENS, ROW_LENGTHS, LOSSES)]
    if args.loss_by not in columns:
        raise InvalidConfig(
            f"loss_by='{args.loss_by}': the training dataset has no such column.",
            why=[f"columns: {', '.join(columns)}"],
            do="Name one of them.",
        )
