"""Loading of a trainer's model: model type, `from_pretrained` arguments, quantization and adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.logging import get_logger
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, TrainingArguments
from trl import get_peft_config, get_quantization_config

from ..adapters import refuse_quantization
from ..config.common import CommonConfig
from ..data.files import missing_path
from ..errors import InvalidConfig, UnsupportedModel
from ..override import set_inside
from ..patching import inspect
from ..terminal.telling import tell

logger = get_logger(__name__)

# Linear layers of Mamba mixers, by model type (transformers 5.23). The mixers' kernels, and partly their plain code,
# read the weights of these layers and never call them. So an adapter there has no effect, and a quantized weight
# cannot be read.
READ_DIRECTLY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), ("out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), ("out_proj", "x_proj", "dt_proj")),
    "jamba": ("dt_proj",),
}


def output_dir(model: str | PreTrainedModel | PeftModel, method: str = "SFT") -> str:
    """Return TRL's default output directory for a model that is trained by a method (`"SFT"`, `"DPO"` ...)."""
    name = model if isinstance(model, str) else model.config.name_or_path or ""
    return f"{name.rstrip('/').split('/')[-1] or 'model'}-{method}"


@contextmanager
def telling_of_model(name: str, *, adapter: str | None = None) -> Iterator[None]:
    """Turn transformers' errors about a model that cannot be loaded, or about the base of an adapter, into one."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"cannot load the {'model' if adapter is None else f'base of the adapter {adapter},'} '{name}'.",
            why=missing_path(name)
            or [str(error) if Path(name).exists() else f"there is no such folder, and as a name on the Hub: {error}"],
            do="Check the name, or the path of a folder" + ("; merge takes it as --base." if adapter else "."),
        ) from error


def config_of(name: str, args: CommonConfig) -> PretrainedConfig:
    """Read the config of a model by name, without its weights."""
    revision, trusts = init_kwargs(args)["revision"], args.trust_remote_code
    with telling_of_model(name):
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trusts)


def init_kwargs(args: CommonConfig) -> dict[str, Any]:
    """Return `from_pretrained` arguments as TRL's script makes them from a `ModelConfig`; `model_init_kwargs` wins.

    The model is loaded onto this process's device. TRL would split even a small one over all visible GPUs.
    """
    kwargs = {"revision": args.model_revision, "dtype": args.dtype, "attn_implementation": args.attn_implementation}
    # On these devices TRL loads without a map: on MPS one crashes. In runs of several processes it drops ours.
    kwargs["device_map"] = None if args.device.type in ("cpu", "mps") else {"": str(args.device)}
    return {**kwargs, **(args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {})}


def quantization_of(kind: str, args: CommonConfig) -> BitsAndBytesConfig | None:
    """Return the quantization that the arguments ask for; `None` if `model_init_kwargs` has its own."""
    if "quantization_config" in init_kwargs(args):
        return None
    config = get_quantization_config(args)
    if args.packing and args.load_in_8bit and config is not None:
        logger.warning(
            "trl-packfa: load_in_8bit=True loads with llm_int8_threshold=0.0, not bitsandbytes' %s, because outliers "
            "of one document would change the numbers of others. Columns with outliers are in 8 bits too, which costs "
            "accuracy on models that have some; load_in_4bit=True has no such columns.",
            config.llm_int8_threshold,
        )
        config.llm_int8_threshold = 0.0
    if config is not None and (read := READ_DIRECTLY.get(kind)):
        config.llm_int8_skip_modules = ["lm_head", *read]
    return config


def _misfit(error: ValueError, model: Any, args: Any) -> InvalidConfig | None:
    """Return an error that names the field to change for PEFT's about the default adapter; `None` for other errors."""
    if "does not work with lora_dropout" in str(error):
        return InvalidConfig(
            f"lora_dropout={args.lora_dropout} on a mixture of experts.",
            why=["PEFT adapts the weights of all experts as one parameter, and supports no dropout there"],
            do="Set lora_dropout=0, or name only linear layers in lora_target_modules (q_proj, v_proj ...).",
        )
    if "not found in the base model" not in str(error):  # PEFT 0.19 raises a plain ValueError
        return None
    layers = ", ".join(_linear_layers(model, args))
    return InvalidConfig(
        f"lora_target_modules={args.lora_target_modules} matches no layer of the model.",
        why=[f"its linear layers are {layers}"] if layers else [],
        do="Name some of its layers, or drop lora_target_modules to adapt all linear ones.",
    )


def _linear_layers(model: Any, args: Any) -> list[str]:
    """List the last name parts of a model's linear layers, without the LM head; `[]` if it cannot be built."""
    if (model := _built(model, args)) is None:
        return []
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return sorted({name.rsplit(".", 1)[-1] for name in linear} - {"lm_head"})


def _built(model: Any, args: Any) -> Any:
    """Return the model; one that is given by name is built without weights. `None` if that is not possible."""
    if not isinstance(model, str):
        return model
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        with torch.device("meta"):
            return getattr(transformers, (config.architectures or [""])[0])(config)
    except (AttributeError, TypeError, ValueError, OSError, RuntimeError):
        return None


def default_adapter(kind: str, args: CommonConfig, model: Any) -> Any:
    """Return the LoRA config that the arguments ask for, `None` for full fine-tuning.

    `"all-linear"` leaves out the layers in `READ_DIRECTLY`: they are never called, so an adapter would not be trained.
    In a model with images or sounds it means the layers of the text decoder.
    """
    config: Any = get_peft_config(args)
    if config is None or config.target_modules != "all-linear":
        return config
    if kind in READ_DIRECTLY:
        config.exclude_modules = set(READ_DIRECTLY[kind])
    elif (name := _decoder_name(model, args)) is not None:
        config.exclude_modules = rf"(?!{re.escape(name)}\.).*"  # PEFT matches it with the whole name of a layer
    return config


def _decoder_name(model: Any, args: CommonConfig) -> str | None:
    """Return the name of the text decoder in a model with images or sounds, `None` in any other model."""
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        if config.get_text_config() is config:
            return None
    if (built := _built(model, args)) is None or (decoder := inspect.text_decoder(built)) is None:
        return None
    return next(name for name, module in built.named_modules() if module is decoder)


def optimized(given: dict[str, Any]) -> list[nn.Parameter]:
    """List the parameters of the optimizer that the user has built or begun, `[]` if the Trainer will make it.

    `given` are the trainer's arguments. An iterator of parameters in them can be read once, so a list replaces it.
    """
    optimizer, schedule = given.get("optimizers") or (None, None)
    optimizer = optimizer if optimizer is not None else getattr(schedule, "optimizer", None)
    if optimizer is not None:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not given.get("optimizer_cls_and_kwargs"):
        return []
    cls, kwargs = given["optimizer_cls_and_kwargs"]
    if "params" not in kwargs:  # the Trainer takes the parameters from one of these
        model = kwargs.get("model")
        return [*kwargs.get("optimizer_dict", ()), *(model.parameters() if isinstance(model, nn.Module) else ())]
    groups = [{**group, "params": _listed(group["params"])} if isinstance(group, dict) else group
              for group in kwargs["params"]]  # fmt: skip
    given["optimizer_cls_and_kwargs"] = cls, {**kwargs, "params": groups}
    held = [one for group in groups for one in (group["params"] if isinstance(group, dict) else [group])]
    return [one[1] if isinstance(one, tuple) else one for one in held]  # named parameters are pairs


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


@contextmanager
def loading_as_configured(
    model: str | PreTrainedModel | PeftModel,
    args: CommonConfig,
    given: dict[str, Any],
    *,
    user_args: TrainingArguments | None,
    task: str | None = None,
) -> Iterator[None]:
    """Let TRL load and adapt the model as the arguments say, inside a `with` block.

    `given`, the trainer's arguments, gets `quantization_config` and `peft_config`; those of the user win, and a model
    whose parameters an optimizer of the user holds gets no adapter. For the block the config has the
    `model_init_kwargs` of a model by name. `user_args` is the config that the user passed, `task` the adapter's
    task type.

    Raises:
        [`UnsupportedModel`]: for a quantization that lets documents of a batch change each other's numbers.
        [`InvalidConfig`]: if the default adapter does not fit the model.
    """
    if args.packing and args.fp16 and args.device.type == "cpu":
        logger.warning("trl-packfa: fp16=True has no effect on a CPU: accelerate computes in the weights' own dtype.")
    quantization, adapter = given.get("quantization_config"), given.get("peft_config")
    loading = args.model_init_kwargs
    kind = config_of(model, args).model_type if isinstance(model, str) else None
    if kind is not None:
        loading, quantization = init_kwargs(args), quantization or quantization_of(kind, args)
        _tell_idle_gpus(args)
        # Padded training may use such a quantization, if the user chooses it. Only packing promises that documents do
        # not affect each other.
        if args.packing:
            refuse_quantization(quantization or loading.get("quantization_config"))
    if adapter is None and not isinstance(model, PeftModel) and args.use_peft:
        if why := _why_as_it_is(model, optimized(given)):
            logger.warning("trl-packfa: no LoRA adapter is added: %s.", why)
        else:
            adapter = default_adapter(kind or inspect.model_type(model), args, model)  # type: ignore[arg-type]
        if adapter is not None:
            if task is not None:
                adapter.task_type = task
            if not isinstance(user_args, type(args)):  # the user passed no config of ours
                logger.warning(
                    "trl-packfa: with %s, %s adds a LoRA adapter (r=%s) and trains that alone. %s(use_peft=False) "
                    "trains all parameters.",
                    "no config" if user_args is None else f"a plain {type(user_args).__name__}",
                    type(args).__name__.replace("Config", "Trainer"), adapter.r, type(args).__name__,
                )  # fmt: skip
    if said := args.settle_learning_rate(adapts=adapter is not None or isinstance(model, PeftModel)):
        tell(args, said)
    given |= {"quantization_config": quantization, "peft_config": adapter}
    try:
        with set_inside(args, model_init_kwargs=loading):  # the config is the user's
            yield
    except ValueError as error:
        if (misfit := _misfit(error, model, args)) is None:
            raise
        raise misfit from error


def _tell_idle_gpus(args: CommonConfig) -> None:
    """Tell that a run of one process uses one of several visible GPUs, unless the user has placed the model."""
    if args.world_size > 1 or torch.cuda.device_count() < 2 or "device_map" in (args.model_init_kwargs or {}):
        return
    tell(
        args,
        f"one process trains on {args.device}, one of {torch.cuda.device_count()} visible GPUs. `accelerate launch` "
        "trains on all; model_init_kwargs={'device_map': 'auto'} spreads a model that does not fit on one",
    )


def _why_as_it_is(model: Any, optimizer: list[nn.Parameter]) -> str:
    """Return the reason why a model gets no default adapter: what the user has built on it; `""` if there is none."""
    if held := _held(model, optimizer):
        return (
            f"the optimizer that was passed holds {held} of the model's parameters, and an adapter would freeze them"
        )
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is around the model, and an adapter inside of it is not known to it"
    if isinstance(model, nn.Module) and any(isinstance(p, DTensor) for p in model.parameters()):
        return "the model's weights are sharded, and those of an adapter would not be"
    return ""


def _held(model: Any, optimizer: list[nn.Parameter]) -> int:
    """Count the parameters of an optimizer that train in a model; an adapter would freeze them."""
    own = {id(p) for p in model.parameters() if p.requires_grad} if isinstance(model, nn.Module) else set()
    return sum(id(parameter) in own for parameter in optimizer)


def require_trained(model: nn.Module, given: dict[str, Any]) -> None:
    """Refuse an optimizer of the user that holds no parameter which trains in the trainer's model."""
    optimizer = optimized(given)
    if not optimizer or _held(model, optimizer):
        return
    raise InvalidConfig(
        f"the optimizer that was passed holds {len(optimizer)} parameters, and none of them trains.",
        why=["they are frozen, or not the model's: an adapter freezes the model, and a model by name is loaded anew"],
        do="Pass optimizer_cls_and_kwargs without parameters, or make the optimizer of the model that trains: add the "
        "adapter first (peft.get_peft_model), or drop peft_config.",
    )
