"""Checks that refuse invalid arguments, models and datasets before any data is processed, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.training_args import OptimizerNames

from ..adapters import refuse_adapter, refuse_adapters, refuse_quantized
from ..attention import AttentionRequest, get_backend
from ..collator import LOSSES, ROW_LENGTHS
from ..errors import TRAIN_PADDED, InvalidConfig, InvalidDataset, NoBackend, PackingError, UnsupportedModel
from ..layout.from_call import layout_of
from ..patches.measured import results
from ..patches.registry import get_patch_for_type
from ..patching.apply import find_state
from ..patching.inspect import model_config, model_type
from .config import PackedSFTConfig
from .contents import TOKENS
from .liger import refuse_missing_liger
from .parallelism import asked_parallelism, refuse_parallelism, refuse_zero3

# Largest relative difference between two losses that rounding can explain.
_SAME_LOSS = 1e-4
logger = get_logger(__name__)


def refuse_untrainable(model: Any, peft_config: PeftConfig | None) -> None:
    """Refuse models and adapters that cannot be trained at all, packed or not.

    Raises:
        [`InvalidConfig`]: for an adapter on the LM head, and for offloaded weights.
    """
    targets = getattr(peft_config, "target_modules", None) or ()
    if "lm_head" in ([targets] if isinstance(targets, str) else targets):
        raise InvalidConfig(
            "peft_config targets 'lm_head'.",
            why=["TRL multiplies hidden states with lm_head.weight directly, so its adapter would never be trained"],
            do="Remove 'lm_head' from target_modules. To train it in full, name it in modules_to_save.",
        )
    if getattr(model, "hf_device_map", None) and any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidConfig(
            "device_map has offloaded weights of the model, to a disk or from an accelerator to the CPU.",
            why=["torch cannot train through them: they are gone when the backward pass needs them"],
            do="Load the model without device_map, for example with load_in_4bit=True, or shard it: fsdp=True.",
        )


def refuse_arguments(
    args: PackedSFTConfig,
    *,
    compute_metrics: Callable[..., Any] | None,
    peft_config: PeftConfig | None,
    compute_loss_func: Callable[..., Any] | None = None,
) -> None:
    """Refuse trainer arguments that contradict packing.

    Raises:
        [`InvalidConfig`]: with their names.
        [`NoBackend`]: if the named attention backend cannot run on this machine.
        [`VersionTooOld`]: for a DeepSpeed version whose ZeRO-3 cannot be proven.
    """
    if args.loss_weighting == "example" and compute_loss_func is not None:
        raise InvalidConfig(
            "compute_loss_func with loss_weighting='example': the function makes the loss itself.",
            do="Weight the examples in the function, or drop one of the two.",
        )
    if not args.packing:
        return
    if compute_metrics is not None and args.eval_packing:
        raise InvalidConfig(
            "compute_metrics with eval_packing=True: metrics are computed example by example.",
            why=["a packed batch has one row of logits for many examples"],
            do="Leave eval_packing unset. Then evaluation is padded and training stays packed.",
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise InvalidConfig(
            "accelerator_config.dispatch_batches=True cannot carry document boundaries.",
            why=["accelerate would concatenate and cut the packed batches of several ranks"],
            do="Leave dispatch_batches unset.",
        )
    refuse_missing_liger(args)
    refuse_adapters_and_backend(args, peft_config)
    refuse_parallelism(asked_parallelism(args))
    if getattr(args.deepspeed_plugin, "zero_stage", 0) == 3:
        refuse_zero3(args)


def refuse_adapters_and_backend(args: PackedSFTConfig, peft_config: PeftConfig | None) -> None:
    """Refuse an adapter that mixes documents, and a named attention backend that cannot run here.

    Raises:
        [`UnsupportedModel`]: for the adapter.
        [`NoBackend`]: for the backend.
    """
    refuse_adapter(peft_config)
    _refuse_backend(args)


def _refuse_backend(args: PackedSFTConfig) -> None:
    """Refuse a named backend that cannot serve even the simplest model here.

    Whether it can serve the run's model is known only once the model is built.
    """
    if args.attention_backend == "auto":
        return
    # Head dim 64, as many keys as queries, no window, no softcap: every backend that runs here at all can do this.
    plainest = AttentionRequest(args.device, torch.bfloat16, 64, 8, 8, named=True)
    reasons = get_backend(args.attention_backend).refusals(plainest)
    if reasons:
        raise NoBackend(
            f"attention backend '{args.attention_backend}' cannot run here.",
            why=reasons,
            do="Pass attention_backend='auto', or see `trl-packfa backends`.",
        )


def refuse_model(model: str | PreTrainedModel | PeftModel, args: PackedSFTConfig) -> None:
    """Refuse a model, or a model type, that no patch supports or that contradicts the arguments.

    A type that has not been measured passes here; [`patch`] checks it.

    Raises:
        [`UnsupportedModel`]: with the nearest names; also for an adapter or a quantization that mixes documents.
        [`InvalidConfig`]: if the arguments ask to quantize a model that is already loaded.
    """
    name = model if isinstance(model, str) else model_type(model)
    if name in results() and results()[name]["verdict"] != "exact":
        get_patch_for_type(name)  # raises with the reason
    if isinstance(model, str):
        return
    native = getattr(model_config(model), "distributed_config", None)
    refuse_parallelism({name: getattr(native, name, None) or 1 for name in ("tp_size", "ep_size", "pp_size")})
    quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if (args.load_in_4bit or args.load_in_8bit) and not quantized:
        raise InvalidConfig(
            "load_in_4bit or load_in_8bit is set, but the model is already loaded, without quantization.",
            do="Pass the model by name, or load it with a BitsAndBytesConfig and drop the argument.",
        )
    refuse_adapters(model)
    refuse_quantized(model)


# Optimizers that keep their state in the weights' dtype.
_STATE_LIKE_WEIGHTS = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)


def refuse_precision(
    model: torch.nn.Module, args: PackedSFTConfig, *, scales_losses: bool, own_optimizer: bool
) -> None:
    """Refuse trained float16 weights where training them fails; warn if `fp16` has no effect.

    Args:
        model (`torch.nn.Module`):
            The model, its adapter on it.
        args ([`PackedSFTConfig`]):
            The run's arguments.
        scales_losses (`bool`):
            Whether the loss is scaled for float16, as on an accelerator.
        own_optimizer (`bool`):
            Whether the user passes an optimizer.

    Raises:
        [`InvalidConfig`]: if torch would refuse their gradients in the first step, or AdamW's state cannot hold them.
    """
    if args.fp16 and args.device.type == "cpu":
        logger.warning("trl-packfa: fp16=True has no effect on a CPU: accelerate computes in the weights' own dtype.")
    halves = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    why = []
    if scales_losses:
        why += ["fp16=True scales the loss, and torch removes the scale from float32 gradients only"]
    # float16's smallest number is 6e-8, the square of 2.4e-4. Below it AdamW would divide by 0 plus epsilon.
    if args.optim in _STATE_LIKE_WEIGHTS and not own_optimizer:
        why += [
            f"optim='{OptimizerNames(args.optim).value}' keeps its state in float16, where the square of a gradient "
            "below 2e-4 is 0: steps become too large, or NaN"
        ]
    if halves and why:
        raise InvalidConfig(
            f"{len(halves)} trained weights are in float16: {halves[0]}, ...",
            why=why,
            do="Load the model with dtype='float32' or 'bfloat16', or train an adapter, which PEFT keeps in float32.",
        )


def refuse_collator(collator: Callable[[list[Any]], dict[str, Any]] | None) -> None:
    """Refuse a data collator whose batches do not mark where documents begin. It is tried on two small documents.

    Raises:
        [`InvalidConfig`]: if it fails on them or loses the boundary.
    """
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
    """Refuse a `compute_loss_func` whose loss differs between packed and padded documents.

    It is tried on random logits of two small documents.

    Args:
        loss_func (`Callable`):
            Called as TRL calls it: with the model's outputs, labels, `num_items_in_batch`.
        vocabulary (`int`), device (`torch.device`):
            Vocabulary size and device of the logits.

    Raises:
        [`InvalidConfig`]: with both losses, or with the reason why it could not be tried.
    """
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


def refuse_noise(model: Any) -> None:
    """Refuse NEFTune for a backbone that runs documents in batches of its own.

    NEFTune's noise depends on the length of a document's padded row, which is not known there.

    Raises:
        [`UnsupportedModel`]: with the model type.
    """
    state = find_state(model)
    if state is not None and state.patch.rebatch:
        raise UnsupportedModel(
            f"neftune_noise_alpha with model type '{model_type(model)}', whose backbone runs document by document.",
            why=["the range of NEFTune's noise depends on the length of the padded row, which is not known there"],
            do="Drop neftune_noise_alpha, or train padded with packing=False.",
        )


def refuse_data(dataset: Dataset | IterableDataset, *, name: str) -> None:
    """Refuse datasets whose documents exist only after collation.

    Raises:
        [`InvalidDataset`]: for images, and for a dataset that is transformed on the fly.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise InvalidDataset(
            f"the {name} dataset is transformed on the fly (set_transform or with_transform).",
            why=["packing plans with lengths before training, and a resumed run must see the same documents"],
            do="Use dataset.map(...), which is computed once, or reset_format().",
        )
    images = sorted({"image", "images"} & set(next(iter(dataset), {})))
    if images:
        raise InvalidDataset(
            f"the {name} dataset has a column '{images[0]}': a vision dataset cannot be packed.",
            why=["its processor tokenizes images during collation, so their number of tokens is not known before"],
            do=f"Drop the column to train on the text alone, or {TRAIN_PADDED}.",
        )


def refuse_sources(args: PackedSFTConfig, train_dataset: Dataset | IterableDataset | None) -> None:
    """Refuse a `loss_by` column that does not exist or that holds tokens.

    Raises:
        [`InvalidConfig`]: with the columns that exist.
    """
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
