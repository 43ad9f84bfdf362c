"""Every tuner of PEFT with its variants, built on a small Llama, for `adapter_matrix.py` to measure.

The name of a kind is the tuner's folder in PEFT, then the config field that makes a variant, with its value if several
values are variants. Dropout is 0 everywhere, because its noise depends on the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
from peft import PeftConfig, PeftMixedModel, PeftModel, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, CordaConfig, KasaConfig, MontecloraConfig
from tiny_models import small_model
from torch import nn

# Some measured documents contain these tokens, see `adapter_matrix.py`.
INVOCATION = (5, 6, 7)
VOCABULARY = 96
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FEED_IN, _FEED_OUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def base_model() -> Any:
    """Build a Llama of two layers with sizes that are divisible for every tuner."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128}
    return small_model("llama", num_hidden_layers=2, **sizes)


def _config(name: str, **fields: Any) -> PeftConfig:
    targets = {} if "target_modules" in fields else {"target_modules": list(_PROJECTIONS)}
    return getattr(peft, name)(**targets, **fields, task_type="CAUSAL_LM")


def _tuned(name: str, **fields: Any) -> Callable[[], nn.Module]:
    return lambda: get_peft_model(base_model(), _config(name, **fields))  # type: ignore[return-value]


def _lora(**fields: Any) -> Callable[[], nn.Module]:
    return _tuned("LoraConfig", r=4, lora_dropout=0.0, **fields)


def _prompt(name: str, **fields: Any) -> Callable[[], nn.Module]:
    config = {"task_type": "CAUSAL_LM", **fields}
    return lambda: get_peft_model(base_model(), getattr(peft, name)(**config))  # type: ignore[return-value]


def _experts(folder: str) -> Iterator[str]:
    """Save two LoRA adapters as experts for a router, and yield their paths."""
    for number in range(2):
        expert: Any = _lora(target_modules=["q_proj", "v_proj"], init_lora_weights=False)()
        path = Path(folder) / f"expert{number}"
        expert.save_pretrained(path)
        yield str(path)


def _xlora(**fields: Any) -> nn.Module:
    with TemporaryDirectory() as folder:
        adapters = {str(number): path for number, path in enumerate(_experts(folder))}
        options = {"hidden_size": 64, "xlora_dropout_p": 0.0, "use_trainable_adapters": True, **fields}
        base = base_model()
        base.config.use_cache = False  # X-LoRA refuses caches
        return get_peft_model(base, peft.XLoraConfig(task_type="CAUSAL_LM", adapters=adapters, **options))  # type: ignore[return-value]


def _arrow(**fields: Any) -> nn.Module:
    with TemporaryDirectory() as folder:
        config = peft.ArrowConfig(top_k=1, rng_seed=0)
        model: Any = peft.create_arrow_model(base_model(), list(_experts(folder)), config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def _mixed() -> nn.Module:
    model: Any = get_peft_model(base_model(), _config("LoraConfig", r=4, target_modules=["q_proj"]), mixed=True)  # type: ignore[arg-type]
    assert isinstance(model, PeftMixedModel)
    model.add_adapter("second", _config("LoHaConfig", r=4, target_modules=["v_proj"]))
    model.set_adapter(["default", "second"])
    return model


def _two_adapters() -> nn.Module:
    model: Any = _lora()()
    assert isinstance(model, PeftModel)
    model.add_adapter("second", _config("LoraConfig", r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])  # type: ignore[operator]
    return model


def _corda() -> nn.Module:
    from peft.tuners.lora.corda import preprocess_corda  # needs a package that is no dependency of PEFT

    config: Any = _config("LoraConfig", r=4, init_lora_weights="corda", corda_config=CordaConfig())
    base = base_model()
    preprocess_corda(base, config, run_model=lambda: base(torch.arange(8, VOCABULARY)[None]))
    return get_peft_model(base, config)  # type: ignore[return-value]


def _adamss() -> nn.Module:
    # This tuner keeps a copy of the base weights in their dtype at this time.
    return get_peft_model(base_model().double(), _config("AdamssConfig", r=16, num_subspaces=2))  # type: ignore[return-value]


_CPT = {"cpt_token_ids": [3, 4, 5, 6], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]}
_BDLORA = {"target_modules_bd_a": list(_FEED_IN), "target_modules_bd_b": list(_FEED_OUT), "nblocks": 2}

_WEIGHTS = "Use LoRA or another tuner that changes weights, or packing=False."
_VIRTUAL = "virtual tokens are put before the row, not before each document"
_CACHED = "its keys and values are put before the row as a filled cache, not before each document"
_TASKS = "it is told of tasks row by row, and a packed row holds documents of several"
_AVERAGE = "its projection is the average of all activations of a micro-batch, of other documents and pads too"

# The reason why a kind cannot be packed, and what to do instead.
REASONS: dict[str, tuple[str, str]] = {
    "cartridge": (_CACHED, _WEIGHTS),
    "cpt": (_VIRTUAL, _WEIGHTS),
    "lily": ("its router averages over all tokens of a micro-batch, of other documents and pads too", _WEIGHTS),
    "lora velora_config": (_AVERAGE, "Use VeloraConfig(init_type='random'), whose projection is fixed."),
    "lora velora_config.init_type=batch_average_once": (
        _AVERAGE + ", the first one's, which is another one packed than padded",
        "Use VeloraConfig(init_type='random'), whose projection is fixed.",
    ),
    "multitask_prompt_tuning": (_TASKS + "; " + _VIRTUAL, _WEIGHTS),
    "p_tuning": (_VIRTUAL, _WEIGHTS),
    "poly": (_TASKS, _WEIGHTS),
    "prefix_tuning": (_CACHED, _WEIGHTS),
    "prompt_tuning": (_VIRTUAL, _WEIGHTS),
    "shadow": ("it runs a second backbone beside the model's, which no patch reaches", _WEIGHTS),
}

# Packages that a kind imports although PEFT does not depend on them.
NEEDS = {"adamss": "sklearn", "lora init_lora_weights=corda": "attr"}

# Name of each kind, and a function that builds a model of it.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "lora": _lora(),
    "lora alora_invocation_tokens": _lora(alora_invocation_tokens=list(INVOCATION)),
    "lora arrow_config": _arrow,
    "lora bias=all": _lora(bias="all"),
    "lora bias=lora_only": _lora(bias="lora_only"),
    "lora init_lora_weights=False": _lora(init_lora_weights=False),
    "lora init_lora_weights=corda": _corda,
    "lora init_lora_weights=eva": _lora(init_lora_weights="eva", eva_config=peft.EvaConfig()),
    "lora init_lora_weights=gaussian": _lora(init_lora_weights="gaussian"),
    "lora init_lora_weights=lora_ga": _lora(init_lora_weights="lora_ga"),
    "lora init_lora_weights=mica": _lora(init_lora_weights="mica"),
    "lora init_lora_weights=olora": _lora(init_lora_weights="olora"),
    "lora init_lora_weights=orthogonal": _lora(init_lora_weights="orthogonal"),
    "lora init_lora_weights=pissa": _lora(init_lora_weights="pissa"),
    "lora init_lora_weights=pissa_niter": _lora(init_lora_weights="pissa_niter_4"),
    "lora kasa_config": _lora(kasa_config=KasaConfig()),
    "lora layer_replication": _lora(layer_replication=[(0, 2), (1, 2)]),
    "lora lora_bias": _lora(lora_bias=True),
    "lora modules_to_save": _lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head", "norm"]),
    "lora monteclora_config": _lora(monteclora_config=MontecloraConfig(num_samples=2)),
    "lora several adapters": _two_adapters,
    "lora target_parameters": _lora(target_modules=["o_proj"], target_parameters=["q_proj.weight", "up_proj.weight"]),
    "lora trainable_token_indices": _lora(trainable_token_indices=[3, 4, *INVOCATION]),
    "lora use_bdlora": _lora(use_bdlora=BdLoraConfig(**_BDLORA)),
    "lora use_dora": _lora(use_dora=True, target_modules=[*_PROJECTIONS, "embed_tokens"]),
    "lora use_qalora": _lora(use_qalora=True),
    "lora use_rslora": _lora(use_rslora=True),
    "lora velora_config": _lora(velora_config=peft.VeloraConfig(num_groups=4)),
    "lora velora_config.init_type=batch_average_once": _lora(
        velora_config=peft.VeloraConfig(num_groups=4, init_type="batch_average_once")
    ),
    "lora velora_config.init_type=random": _lora(velora_config=peft.VeloraConfig(num_groups=4, init_type="random")),
    "adalora": _tuned("AdaLoraConfig", init_r=4, target_r=2, total_step=10),
    "adamss": _adamss,
    "adaption_prompt": _prompt("AdaptionPromptConfig", adapter_len=4, adapter_layers=1),
    "beft": _tuned("BeftConfig"),
    "boft": _tuned("BOFTConfig", boft_block_size=4, boft_n_butterfly_factor=2),
    "c3a": _tuned("C3AConfig", block_size=16),
    "cartridge": _prompt("CartridgeConfig", num_virtual_tokens=4),
    "cpt": _prompt("CPTConfig", **_CPT),
    "deft": _tuned("DeftConfig", r=4),
    "deft decomposition_method=qr": _tuned("DeftConfig", r=4, decomposition_method="qr"),
    "deft para": _tuned("DeftConfig", r=4, para=True),
    "delora": _tuned("DeloraConfig", r=4),
    "fourierft": _tuned("FourierFTConfig", n_frequency=50),
    "frod": _tuned("FrodConfig", progressbar=False),
    "glora": _tuned("GloraConfig", r=4),
    "glora config_A_B=vector": _tuned("GloraConfig", r=4, config_A_B="vector", config_C="vector", config_D_E="vector"),
    "gralora": _tuned("GraloraConfig", r=4, gralora_k=2),
    "gralora hybrid_r": _tuned("GraloraConfig", r=4, gralora_k=2, hybrid_r=2),
    "hira": _tuned("HiraConfig", r=4),
    "hra": _tuned("HRAConfig", r=4),
    "hra apply_GS": _tuned("HRAConfig", r=4, apply_GS=True),
    "ia3": _tuned("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lily": _tuned("LilyConfig", r=4),
    "ln_tuning": _prompt("LNTuningConfig"),
    "loha": _tuned("LoHaConfig", r=4),
    "lokr": _tuned("LoKrConfig", r=4),
    "lokr decompose_both": _tuned("LoKrConfig", r=2, decompose_both=True),
    "miss": _tuned("MissConfig", r=4),
    "miss init_weights=bat": _tuned("MissConfig", r=4, init_weights="bat"),
    "miss init_weights=mini": _tuned("MissConfig", r=4, init_weights="mini", mini_r=4),
    "mixed": _mixed,
    "multitask_prompt_tuning": _prompt("MultitaskPromptTuningConfig", num_virtual_tokens=4, num_tasks=2),
    "oft": _tuned("OFTConfig", oft_block_size=16, r=0),
    "oft block_share": _tuned("OFTConfig", oft_block_size=16, r=0, block_share=True),
    "oft coft": _tuned("OFTConfig", oft_block_size=16, r=0, coft=True, eps=1e-1),
    "oft use_cayley_neumann=False": _tuned("OFTConfig", oft_block_size=16, r=0, use_cayley_neumann=False),
    "osf": _tuned("OSFConfig", effective_rank=8),
    "p_tuning": _prompt("PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
    "peanut": _tuned("PeanutConfig", r=4, depth=2),
    "poly": _tuned("PolyConfig", r=4, n_tasks=2, n_skills=2),
    "prefix_tuning": _prompt("PrefixTuningConfig", num_virtual_tokens=4),
    "prompt_tuning": _prompt("PromptTuningConfig", num_virtual_tokens=4),
    "psoft": _tuned("PsoftConfig", r=4),
    "psoft use_cayley_neumann": _tuned("PsoftConfig", r=4, use_cayley_neumann=True),
    "pvera": _tuned("PveraConfig", r=8),
    "randlora": _tuned("RandLoraConfig", r=4),
    "road": _tuned("RoadConfig", group_size=16),
    "road variant=road_2": _tuned("RoadConfig", group_size=16, variant="road_2"),
    "road variant=road_4": _tuned("RoadConfig", group_size=16, variant="road_4"),
    "shadow": _prompt("ShadowConfig", shadow_dropout=0.0),
    "shira": _tuned("ShiraConfig", r=4),
    "supertuning": _tuned("SupertuningConfig", sparsity=0.9),
    "tinylora": _tuned("TinyLoraConfig", r=2, u=8),
    "trainable_tokens": _prompt("TrainableTokensConfig", token_indices=[3, 4, *INVOCATION]),
    "unilora": _tuned("UniLoraConfig", r=4, theta_d_length=64),
    "vblora": _tuned("VBLoRAConfig", r=4, num_vectors=16, vector_length=16),
    "vera": _tuned("VeraConfig", r=8),
    "waveft": _tuned("WaveFTConfig", n_frequency=64),
    "xlora": _xlora,
}


def randomize(model: nn.Module, *, seed: int = 0) -> None:
    """Add noise to every trained weight, because most new adapters change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter += 0.1 * noise
