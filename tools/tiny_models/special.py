"""Extra config values of single model types, by the type of the config, also of nested configs."""

from __future__ import annotations

from typing import Any

from tiny_models.sizes import DEPTH, VOCABULARY

_S, _F, _L = "sliding_attention", "full_attention", "linear_attention"
_MIXED = [_S, _F] * (DEPTH // 2)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPARSE_AFTER_FIRST = ["dense"] + ["sparse"] * (DEPTH - 1)
# Qwen's sliding layers are the last ones, and only if they are turned on.
_QWEN = {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}
# Every second indexed layer reuses the indices of the layer before it.
_SHARED_INDEX = {"indexer_types": ["full", "shared"] * (DEPTH // 2)}
_TWO_TOWERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"] * (DEPTH // 2),
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 8,
    "rel_extent": 16,
    "log_scaling_n_floor": 8,
}

SPECIAL: dict[str, dict[str, Any]] = {
    # full and sliding attention, where the full-size default has one kind only
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN | {"mlp_only_layers": [1]},
    "qwen3": _QWEN,
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_next": {"mlp_only_layers": [1]},
    "dots1": {"max_window_layers": 2, "layer_types": None},
    "smollm3": {"use_sliding_window": True, "layer_types": _MIXED, "no_rope_layers": [1, 1, 0, 0]},
    "mellum": {"layer_types": _MIXED, "mlp_layer_types": _SPARSE_AFTER_FIRST},
    "laguna": {"layer_types": _MIXED, "num_attention_heads_per_layer": [4] * DEPTH},
    "flint": {"mlp_only_layers": [0]},
    "gpt_neo": {"attention_types": [[["global", "local"], DEPTH // 2]]},
    "modernbert-decoder": {"local_attention": 16},
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {_S: _ROPE | {"mrope_section": [4, 2, 2]}, _F: _ROPE | {"mrope_section": [4, 2, 2]}},
    },
    "cohere2_moe": {"num_shared_experts": 1, "mlp_layer_types": _SPARSE_AFTER_FIRST},
    "gemma3n_text": {
        "layer_types": _MIXED,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": _MIXED,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 32,
        "enable_moe_block": True,
    },
    "gemma4_unified_text": {"layer_types": _MIXED, "num_kv_shared_layers": 2, "global_head_dim": 32},
    "llama4_text": {
        "layer_types": None,
        "no_rope_layers": [1, 0, 1, 0],
        "moe_layers": [1, 2],
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "floor_scale": 8,
    },
    # latent attention, indexers and compressed keys
    "axk2": {"gated_norm_rank": 8},
    "glm_moe_dsa": _SHARED_INDEX,
    "hy_v4": _SHARED_INDEX | {"hc_mult": 2},
    "longcat_flash": {"zero_expert_num": 2},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", _S] * (DEPTH // 2),
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "deepseek_v4": {
        "layer_types": [
            _S,
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": [_F, "minimax_m3_sparse", "minimax_m3_sparse", _F],
        "mlp_layer_types": _SPARSE_AFTER_FIRST,
        "index_n_heads": 2,  # one for each head of the keys; its scores do not tie
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "rotary_dim": 8,
    },
    "qwen4_exp_text": {
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": VOCABULARY,
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 1,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    # states and convolutions
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"] * (DEPTH // 2),
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "cca_time0": 3,
        "cca_time1": 3,
    },
    "lfm2": {"layer_types": ["conv", _F] * (DEPTH // 2), "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", _F] * (DEPTH // 2)},
    "lfm3": {"layer_types": ["conv", _F, "conv", _S], "conv_L_cache": 4},
    "inkling_text": _INKLING | {"mlp_layer_types": _SPARSE_AFTER_FIRST, "logits_mup_width_multiplier": 1.0},
    "inkling2_text": _INKLING | {"unpadded_vocab_size": VOCABULARY, "n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": _INKLING
    | {
        "unpadded_vocab_size": VOCABULARY,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3, "expert_layer_offset": 1},
    "zamba": {"layers_block_type": [_L, "hybrid"] * (DEPTH // 2), "n_mamba_heads": 2},
    "zamba2": {
        "layers_block_type": [_L, "hybrid"] * (DEPTH // 2),
        "n_mamba_heads": 4,
        # its adapters add to keys of all heads, and its rotation asks for a head size that the class does not set
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_mem_blocks": 2,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
    },
    # the rate of forgetting is the bound times a sigmoid near one half
    "bailing_hybrid": {"kda_lower_bound": -0.2},
    "granitemoehybrid": {"layer_types": [_L, _F] * (DEPTH // 2), "position_embedding_type": "rope"},
    "minimax": {"layer_types": [_F, _L] * (DEPTH // 2), "sliding_window": None},
    "nemotron_h": {"sliding_window": None},
    "recurrent_gemma": {
        "lru_width": 64,
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "rwkv": {"attention_hidden_size": 64, "context_length": 256},
    "xlstm": {"num_blocks": DEPTH, "embedding_dim": 64},
    # encoders and parts of encoder-decoders that have to be told to be causal
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "prophetnet": _TWO_TOWERS | {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 64},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_embed_dim": 16,
        "shape_vocab_size": VOCABULARY,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"] * (DEPTH // 2),
        "attention_head_size": 16,
        "axial_pos_embds": False,
        "feed_forward_size": 96,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "cpmant": {"prompt_length": 4, "prompt_types": 3, "segment_types": 3, "position_bias_num_buckets": 32},
    "whisper": {"max_target_positions": 256, "max_source_positions": 64},
    # others
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "opt": {"word_embed_proj_dim": 64},
    "falcon": {"num_kv_heads": 1},
    "jetmoe": {"kv_channels": 16},
    "hrm_text": {"num_layers_per_stack": 2},
    "phi4_multimodal": {"sliding_window": None},
    "doge": {"num_experts": 16, "sliding_window": None},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "minicpm3": {"dim_model_base": 16},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "blt": {
        "cross_attn_k": 2,
        "local_attention_window_len": 8,
        # a little above the entropy of most predictions over this vocabulary, for patches of several tokens
        "patching_threshold": 3.75,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 127,
        "decoder_config": {"num_hidden_layers": 2, "hidden_size_global": 128},
        "encoder_config": {"num_hidden_layers": 1, "hidden_size_global": 128},
        "global_config": {"num_hidden_layers": 2, "hidden_size": 128},
        "patcher_config": {"num_hidden_layers": 2},
    },
    # towers for what is not text; no text goes through them
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    },
    "got_ocr2_vision": {
        "image_size": 32,
        "patch_size": 8,
        "mlp_dim": 96,
        "output_channels": 16,
        "global_attn_indexes": [1],
    },
    "phi4_multimodal_vision": {"image_size": 56, "crop_size": 56, "patch_size": 14},
    "phi4_multimodal_audio": {
        "num_blocks": 2,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 16,
        "bias_max_distance": 16,
    },
}
