"""A small random model of any causal-LM type, from what its config class happens to call its sizes."""

import warnings

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # decoders of encoder-decoders, and encoders used as decoders
    "is_decoder": True,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    # older names
    "num_layers": 4,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 64,
    "d_model": 64,
}
_ALWAYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "is_decoder")
# Sizes that some classes derive themselves and contradict.
_DROPPED = (
    (),
    ("head_dim",),
    ("qk_rope_head_dim",),
    ("head_dim", "qk_rope_head_dim"),
    ("sliding_window",),
    ("num_key_value_heads",),
    ("head_dim", "sliding_window", "num_key_value_heads"),
    ("num_experts", "num_local_experts", "n_routed_experts"),
)
_MOST_PARAMETERS = 20e6


def model(model_type):
    """The model, with weights that mix tokens strongly; the last error if no set of sizes builds and runs one."""
    logging.set_verbosity_error()
    failure = None
    for dropped in _DROPPED:
        try:
            with warnings.catch_warnings(action="ignore"):
                return _build(model_type, dropped)
        except Exception as error:  # whatever a config class raises: the next set of sizes may do
            failure = error
    raise failure


def _build(model_type, dropped):
    cls = CONFIG_MAPPING[model_type]
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})} | set(_ALWAYS)
    config = cls(**{name: size for name, size in _SIZES.items() if name in known and name not in dropped})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert parameters < _MOST_PARAMETERS, f"{model_type} ignores the sizes it is given: {parameters:.0f} parameters"
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in built.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
    built(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    return built
