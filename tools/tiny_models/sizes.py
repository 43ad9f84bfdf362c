"""Generic sizes of the small models, and the types that cannot be built."""

from __future__ import annotations

from typing import Any

VOCABULARY = 97
DEPTH = 4

# Each config class gets the sizes that it knows by name.
GENERIC: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "emb_dim", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "d_inner", "dff", "dim_ff", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), DEPTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_head", "dim_head"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    "embedding_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # windows, chunks and blocks, far below the 71 tokens of a row
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 8),
    **dict.fromkeys(("attention_chunk_size", "chunk_size", "block_size", "mamba_chunk_size"), 8),
    # Equal tokens have equal keys in the first layer, and top-k breaks ties as it likes: nothing is to be dropped.
    "keep_window_size": 2048,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
                     "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
                     "shared_intermediate_size"), 32),
    "dense_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    # sparse indexers; with fewer heads the ReLU scores tie at zero and the choice is arbitrary
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 32,
    # state space and linear attention
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    "n_groups": 2,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    # decoders of encoder-decoders, and encoders used as decoders
    "is_decoder": True,
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    # scores divided by the root of the head size
    "attention_multiplier": 0.25,
    "query_pre_attn_scalar": 16,
    # the same in training mode
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "residual_dropout",
                     "resid_dropout", "embed_dropout", "embedding_dropout", "mlp_dropout", "hidden_dropout_prob",
                     "attention_probs_dropout_prob", "local_attention_probs_dropout_prob",
                     "lsh_attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "emb_pdrop",
                     "layerdrop", "decoder_layerdrop", "router_jitter_noise", "input_jitter_noise"), 0.0),
}  # fmt: skip

# Types without a text model for a row of token ids, with the reason.
NOT_BUILDABLE: dict[str, str] = {
    "gemma3n": "its vision tower needs the timm and PIL libraries (its text part alone is gemma3n_text)",
    "gemma4_assistant": "a draft model: its forward takes the keys and values of the model that it drafts for",
    "gemma4_unified_assistant": "a draft model: its forward takes the keys and values of the model that it drafts for",
    "musicgen": "AutoModelForCausalLM gives its composite config to a class that takes the decoder's",
    "musicgen_melody": "AutoModelForCausalLM gives its composite config to a class that takes the decoder's",
}
