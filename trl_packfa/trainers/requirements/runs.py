"""Requirements of a run as a whole: packages, parallelism and model, before weights are read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from huggingface_hub import HfApi
from packaging.version import Version
from peft import PeftModel
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext
from transformers.integrations import integration_utils
from transformers.utils import is_flash_attn_2_available
from trl import SFTConfig

from ...adapters import refuse_adapter, verdicts_on
from ...attention import AttentionRequest, get_backend
from ...config.arguments import FLOAT8, names_head
from ...config.requirements import Found, Requirement, where
from ...errors import TRAIN_PADDED, MissingPackage, NoBackend, PackingError, UnsupportedModel, VersionTooOld
from ...packing import MINIBATCH
from ...parallel.ranks import RowGroups
from ...patches.measured import composites, results
from ...patches.registry import get_patch_for_type
from ...patching import inspect
from ...versions import installed_version
from .data import DATA, TEXTS
from .training import Training, error_of
from .trials import how_loss_differs

# The first tested DeepSpeed whose engine can leave gradients alone while the check reads them.
_DEEPSPEED = "0.19.8"
# The first transformers whose Trainer was measured with processes that share rows.
_TRANSFORMERS = "5.23.0"
# Ways to divide a model or a row over ranks, by the argument that switches them on.
_DIVIDED = {
    "tp_size": "tensor parallelism: ranks that share a layer need the same rows, but each rank gets its own rows",
    "ep_size": "expert parallelism: ranks that share a layer need rows that pass it together",
    "pp_size": "pipeline parallelism: stages pass hidden states on without the boundaries of their documents",
    "cp_size": "context parallelism: a row is cut anywhere, and attention across the cut has no document boundaries",
    "sp_size": "sequence parallelism: ranks exchange heads for tokens inside the attention that packing replaces",
}
# Names of integrations in transformers' `is_NAME_available` functions, where they differ from `report_to`'s.
_LOOKED_FOR_AS = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}
_REPORTERS = integration_utils.INTEGRATION_TO_CALLBACK


def _missing_backend(run: Training) -> Any:
    if run.attention_backend == "auto":
        return None
    # Whether it can serve the run's model is known only once the model is built. Head dim 64, as many keys as queries,
    # no window, no softcap: every backend that runs here at all can do this.
    plainest = AttentionRequest(run.device, torch.bfloat16, 64, 8, 8, named=True)
    reasons = get_backend(run.attention_backend).refusals(plainest)
    return reasons and Found(run.attention_backend, reasons)


def parallel_sizes(args: Any, model: Any = None) -> dict[str, int]:
    """Read the parallel sizes that arguments, accelerate's environment, DeepSpeed's config or a loaded model have."""
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    sizes = {name: getattr(config, name, None) or 1 for name in _DIVIDED}
    kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    native = kwargs.get("distributed_config")
    of_native: Any = native.get if isinstance(native, dict) else partial(getattr, native)
    loaded = getattr(inspect.model_config(model), "distributed_config", None) if isinstance(model, nn.Module) else None
    deepspeed: Any = getattr(args.deepspeed_plugin, "deepspeed_config", None) or {}
    sizes["tp_size"] = max(sizes["tp_size"], deepspeed.get("tensor_parallel", {}).get("autotp_size") or 1)
    for name in ("tp_size", "ep_size", "pp_size"):
        asked = (kwargs.get(name), of_native(name, None), getattr(loaded, name, None))
        sizes[name] = max(sizes[name], *(size or 1 for size in asked))
    if kwargs.get("tp_plan") or of_native("tp_plan", None):
        sizes["tp_size"] = max(sizes["tp_size"], args.world_size)
    return sizes


def _divided(run: Training) -> Any:
    found = {name: size for name, size in parallel_sizes(run.args, run.model).items() if size > 1}
    return found and Found(", ".join(f"{name}={size}" for name, size in found.items()), [_DIVIDED[n] for n in found])


def _saves_products_in_place(run: Training) -> list[str]:
    """List the products of fused LoRA that a selective checkpoint's policy saves, though the next one adds to them.

    torch notices that only in the backward, and does not say whose tensor it is.
    """
    contexts = (run.gradient_checkpointing_kwargs or {}).get("context_fn")
    adapted = run.given.get("peft_config") is not None or isinstance(run.model, PeftModel)
    if contexts is None or not adapted or run.torch_compile or not run.fused_kernels:
        return []
    decide, x = getattr(contexts()[0], "policy_fn", None), torch.zeros(2, 2)
    calls: Any = (
        (torch.ops.aten.mm.out, (x, x), {"out": x}),
        (torch.ops.aten.addmm.out, (x, x, x), {"out": x}),
        (torch.ops.aten.addmm_.default, (x, x, x), {}),
    )
    saves = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    context = SelectiveCheckpointContext(is_recompute=False)
    return [str(op) for op, given, named in calls if decide and decide(context, op, *given, **named) in saves]


def _scales_zero3(run: Training) -> bool:
    config: Any = getattr(run.deepspeed_plugin, "deepspeed_config", None) or {}
    enabled = config.get("fp16", {}).get("enabled")
    # transformers replaces "auto" values, some of them later than now.
    scales = run.fp16 or enabled is True or (enabled == "auto" and run.fp16_full_eval)
    return _is_zero3(run) and bool(scales)


def _is_zero3(run: Training) -> bool:
    return getattr(run.deepspeed_plugin, "zero_stage", 0) == 3


def _older(package: str, than: str) -> str:
    found = installed_version(package)
    return (found or "none") if Version(found or "0") < Version(than) else ""


def _is_loaded_whole(model: Any) -> bool:
    quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    return isinstance(model, nn.Module) and not quantized


def _refused_type(run: Training) -> PackingError | None:
    name = run.config.model_type
    known = results().get(name, {"verdict": "exact"})
    return None if known["verdict"] == "exact" else error_of(get_patch_for_type, name)


def _refused_with_images(run: Training) -> Any:
    """Return the type of a model by name that was measured and cannot run images; an object is measured itself."""
    if not (isinstance(run.model, str) and run.images[1]):
        return None
    kind = run.config.model_type
    known = composites()["types"].get(kind, {})
    return known.get("verdict") in ("refused", "text only") and Found(kind, [known["why"]])


def _unwritable(run: Training) -> Any:
    folder = Path(run.output_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Test by writing, because permissions say little on network file systems, and nothing to root.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        files = [f"{part} is a file" for part in (folder, *folder.parents) if part.is_file()]
        return Found(error.strerror or error, files[:1])


def _not_at_hub(run: Training) -> str:
    if not run.push_to_hub:
        return ""
    try:
        HfApi().whoami(token=run.hub_token)
    except Exception as error:  # any network error means that nothing could be pushed
        return str(error).split("\n", 1)[0] or repr(error)
    return ""


def _missing_package(run: Training) -> str:
    for name in run.report_to or []:
        look = getattr(integration_utils, f"is_{_LOOKED_FOR_AS.get(name, name)}_available", None)
        if look is not None and not look():
            return name
    return ""


def _without_flash(run: Training) -> str:
    if run.attn_implementation != "flash_attention_2" or is_flash_attn_2_available():
        return ""
    return "flash-attn finds no GPU" if find_spec("flash_attn") else "flash-attn is not installed"


def _is_unenforced(run: Training) -> bool:
    """Tell whether a plain `SFTConfig` asks for `padding_free` with a `max_length`, and not for packing."""
    given = run.user_args
    plain = given if isinstance(given, SFTConfig) and not isinstance(given, type(run.args)) else None
    return plain is not None and plain.padding_free and not plain.packing and plain.max_length is not None


def _differing_loss(run: Training) -> Any:
    func = run.given.get("compute_loss_func")
    if func is None:
        return None
    why = how_loss_differs(func, run.config.get_text_config().vocab_size, run.device)
    return why and Found(getattr(func, "__name__", type(func).__name__), [why])


def _unshareable(argument: str, when: Callable[[Any], Any], why: str) -> Requirement:
    """Return the row of an argument with which processes cannot share rows."""
    what = argument + " with sequence_parallel={r.sequence_parallel} cannot be trained."
    do = f"Drop {argument}, or sequence_parallel."
    return Requirement(when, what, why=why, do=do)


# Of this machine and the trainer's other arguments.
MACHINE = (
    Requirement(lambda r: names_head(getattr(r.given.get("peft_config"), "target_modules", None)),
        "peft_config targets 'lm_head'.",
        why="TRL multiplies hidden states with lm_head.weight directly, so its adapter would never be trained",
        do="Remove 'lm_head' from target_modules. To train it in full, name it in modules_to_save."),
    Requirement(lambda r: r.activation_offloading and torch.accelerator.current_accelerator() is None,
        "activation_offloading=True without an accelerator.",
        why="it moves activations from an accelerator to the CPU", do="Drop activation_offloading."),
    Requirement(lambda r: getattr(r.model, "hf_device_map", None) and any(p.is_meta for p in r.model.parameters()),
        "device_map has offloaded weights of the model, to a disk or from an accelerator to the CPU.",
        why="torch cannot train through them: they are gone when the backward pass needs them",
        do="Load the model without device_map, for example with load_in_4bit=True, or shard it: fsdp=True."),
    Requirement(lambda r: next(((name, ", ".join(_REPORTERS)) for name in r.report_to or []
        if name not in _REPORTERS), ()),
        "report_to='{found[0]}' does not exist.", do="Choose from {found[1]}, or pass report_to='none'."),
    Requirement(_missing_package,
        "report_to='{found}': its package is not installed, or not set up.",
        do="pip install {found}, or pass report_to='none'.", error=MissingPackage),
    Requirement(_without_flash,
        "attn_implementation='flash_attention_2' cannot run here.",
        why="{found}",
        do="Drop it, because attention_backend chooses the packed attention. Or pip install 'trl-packfa[flash]'.",
        error=MissingPackage),
    *where(lambda r: r.packing,
        FLOAT8,
        Requirement(lambda r: ", ".join(_saves_products_in_place(r)),
            "gradient_checkpointing_kwargs: the policy of context_fn saves {found}.",
            why="fused LoRA adds to such a product in place, which torch would refuse in the backward",
            do="Save other operators, as {{'selective': True}} saves attention, or pass fused_kernels=False.",
            shown="a selective checkpoint that saves products of fused LoRA which are written in place"),
        Requirement(lambda r: r.loss_weighting == "example" and r.given.get("compute_loss_func"),
            "compute_loss_func with loss_weighting='example'.",
            why="the function makes the loss itself",
            do="Weight the examples in the function, or drop one of the two."),
        Requirement(lambda r: getattr(r.accelerator_config, "dispatch_batches", None),
            "accelerator_config.dispatch_batches=True cannot carry the boundaries of documents, or the pairs of a "
            "step.",
            why="accelerate would concatenate and cut the batches of several ranks",
            do="Leave dispatch_batches unset."),
        Requirement(lambda r: error_of(refuse_adapter, r.given.get("peft_config")),
            "an adapter that cannot be packed.", why="[measured](models.md#adapters)"),
        Requirement(_missing_backend,
            "attention backend '{found}' cannot run here.",
            why="its own requirements: `trl-packfa env`",
            do="Pass attention_backend='auto', or see `trl-packfa env`.", error=NoBackend),
        Requirement(_divided,
            "{found} cannot be packed.",
            why="such parallelism divides a layer or a row without the boundaries of its documents",
            do="Share rows with PackedSFTConfig(sequence_parallel=N), shard the model with FSDP2 (fsdp=True), or "
            f"{TRAIN_PADDED}.",
            shown="tp_size, ep_size, pp_size, cp_size or sp_size above 1, wherever it is asked for"),
    ),
    *where(lambda r: r.packs_rows,
        Requirement(_is_unenforced,
            "padding_free=True without packing, and max_length={r.max_length}.",
            why="TRL does not enforce max_length then, and refuses this combination",
            do="Pass packing=True, max_length=None, or a PackedSFTConfig, which cuts documents and counts it."),
        Requirement(lambda r: r.eval_packing and r.given.get("compute_metrics"),
            "compute_metrics with eval_packing=True: metrics are computed example by example.",
            why="a packed batch has one row of logits for many examples",
            do="Leave eval_packing unset. Then evaluation is padded and training stays packed."),
        Requirement(_scales_zero3,
            "fp16 under DeepSpeed ZeRO-3 cannot be packed.",
            why="there DeepSpeed runs every backward with its loss scaling, but the check measures gradients",
            do="Use bf16=True, or FSDP2 (fsdp=True)."),
        Requirement(lambda r: _is_zero3(r) and _older("deepspeed", _DEEPSPEED),
            f"ZeRO-3 needs deepspeed >= {_DEEPSPEED}, found {{found}}.",
            why="the check needs an engine that can leave gradients alone (coalesce_grad_reduction)",
            do=f"pip install 'deepspeed>={_DEEPSPEED}', or use FSDP2 (fsdp=True).", error=VersionTooOld),
    ),
    *where(lambda r: r.packs_rows and r.sequence_parallel > 1,
        Requirement(lambda r: _older("transformers", _TRANSFORMERS),
            f"sequence_parallel={{r.sequence_parallel}} needs transformers >= {_TRANSFORMERS}, found {{found}}.",
            why="how older Trainers count processes with the same batch was not measured",
            do="Upgrade transformers, or drop sequence_parallel.", error=VersionTooOld),
        Requirement(lambda r: r.world_size % r.sequence_parallel,
            "sequence_parallel={r.sequence_parallel} does not divide the number of processes, {r.world_size}.",
            why="processes share rows in groups of equal size",
            do="Start a multiple of {r.sequence_parallel} processes (torchrun --nproc_per_node), or lower it."),
        _unshareable("parallelism_config",
            lambda r: r.parallelism_config is not None and not isinstance(r.parallelism_config, RowGroups),
            "sequence_parallel makes accelerate's device mesh itself"),
        _unshareable("expand_turns", lambda r: r.expand_turns,
            "the process that computes a prefix must hold the whole row"),
        _unshareable("share_prefixes", lambda r: r.share_prefixes,
            "the process that computes a prefix must hold the whole row"),
        _unshareable("compute_loss_func", lambda r: r.given.get("compute_loss_func"),
            "no process has the logits of the whole row"),
        _unshareable("label_smoothing_factor", lambda r: r.label_smoothing_factor,
            "no process has the logits of the whole row"),
        _unshareable("neftune_noise_alpha", lambda r: r.neftune_noise_alpha,
            "its noise was not measured on parts of a row"),
        _unshareable("train_sampling_strategy='group_by_length'",
            lambda r: r.train_sampling_strategy == "group_by_length" and r.plan == MINIBATCH,
            "its sampler draws other batches in each process of a group; packing_strategy='step' sends them"),
    ),
)  # fmt: skip

MODEL = (
    *where(lambda r: r.packing,
        Requirement(_refused_with_images,
            "a model of type '{found}' runs only text without its pads, and the dataset has images.",
            why="[measured](models.md)", do="Train it padded.", error=UnsupportedModel),
        Requirement(_refused_type, "a model type that cannot be packed.", why="[measured](models.md)"),
        Requirement(lambda r: (r.load_in_4bit or r.load_in_8bit) and _is_loaded_whole(r.model),
            "load_in_4bit or load_in_8bit is set, but the model is already loaded, without quantization.",
            do="Pass the model by name, or load it with a BitsAndBytesConfig and drop the argument."),
        Requirement(lambda r: isinstance(r.model, nn.Module) and error_of(verdicts_on, r.model),
            "a model with an adapter or a quantization that cannot be packed.",
            why="[measured](models.md#adapters)"),
    ),
    *where(lambda r: r.packs_rows,
        Requirement(_differing_loss,
            "compute_loss_func {found} cannot be packed.",
            why="its loss of two small documents, on random logits, is another one if they are packed",
            do="Shift the labels, sum the loss over labels that are not -100 and divide by num_items_in_batch, or "
            "train padded with packing=False."),
    ),
)  # fmt: skip

# What can be said before weights are read. The tokenizer is loaded last.
SETUP = (*DATA, *MACHINE, *MODEL, *TEXTS)

# Of `trl-packfa train`, which would fail only after minutes; the Hub is asked last.
LAUNCH = (
    Requirement(_unwritable,
        "output_dir {r.output_dir} cannot be written to: {found}.",
        do="Name another folder that you can create and write to."),
    Requirement(lambda r: r.max_steps == 0 or (r.max_steps < 0 and r.num_train_epochs <= 0),
        "max_steps={r.max_steps}, num_train_epochs={r.num_train_epochs}: nothing would be trained.",
        do="Raise num_train_epochs, or set max_steps."),
    Requirement(_not_at_hub,
        "push_to_hub=True, but nothing can be pushed to the Hub from here.",
        why="{found}",
        do="Log in with `hf auth login`, or drop push_to_hub: `hf upload REPO FOLDER` pushes after training."),
)  # fmt: skip
