"""Sizes of the small models with images or sounds, beside those of their text parts."""

from __future__ import annotations

from typing import Any

SIDE, PATCH = 32, 8  # pixels of an image and of a patch
# Sizes of encoders, by the names that they share.
ENCODER = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "num_channels": 3,
    "in_channels": 3,
    "in_chans": 3,
    "depth": 2,
    "embed_dim": 64,
    "out_hidden_size": 64,
    "projection_dim": 64,
    "text_hidden_size": 64,
    "projector_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "num_mel_bins": 8,
    "max_source_positions": 40,
    "mm_tokens_per_image": 4,
    "image_seq_length": 16,
    "drop_path_rate": 0.0,
    "window_size": 2 * 2 * PATCH,
    "image_grid_pinpoints": [[SIDE, 2 * SIDE]],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Five frames of the encoder are one token.
_GRANITE_SPEECH = {"window_size": 15, "downsample_rate": 5, "projector_config": {"encoder_hidden_size": 64}}
# More of single config types.
OF_TYPES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"use_bidirectional_attention": "vision"},
    "gemma4_unified_text": {"use_bidirectional_attention": "vision"},
    "mllama_vision_model": {
        "intermediate_layers_indices": [1, 3],
        "vision_output_dim": 3 * 64,
        "num_global_layers": 1,
    },
    # Four frames of the encoder are one token.
    "voxtral": {"audio_token_id": 90},
    "voxtral_encoder": {"intermediate_size": 4 * 64},
    "glmasr_encoder": {"intermediate_size": 4 * 64},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 70, "audio_start_token_id": 71},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 70, "audio_start_token_id": 71},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    # The first tokens of each image see images at two layers more.
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 1]],
        "spatial_target_layers": [0, 1, 2, 3],
        "projector_dropout": 0.0,
        "qformer_config": {"encoder_hidden_size": 64},
    },
    "molmo2_vision": {"image_size": [SIDE, SIDE]},
    "molmo2_adapter": {"vision_feature_layer": [1, 3], "num_key_value_heads": 4},
    "molmo2_text": {"additional_vocab_size": 8},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 3]},
    "deepseek_ocr2_sam_vision_model": {"mlp_dim": 96, "global_attn_indexes": [1], "downsample_channels": [32, 64]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]},
    },
    "janus_vqgan": {"base_channels": 32, "num_embeddings": 16},
    "muse_spark": {"out_hidden_size": 4 * 64},
    "muse_spark_audio": {"hidden_sizes": [16, 32, 32, 64]},
    "cosmos3_edge_text": {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}},
    "hy_v4_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}, "hc_mult": 2},
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "vision_hidden_size": 64,
        "image_token_id": 90,
    },
    "kimi_k25": {"projection_hidden_size": 64},
    # No ids by default.
    "minicpm_ocr": {"image_token_id": 90},
    "minicpmv4_6": {"image_token_id": 90},
    "minicpmv4_7": {"image_token_id": 90},
    "muse_glimmer": {"out_hidden_size": 4 * 64},
    "qwen3_asr_encoder": {"output_dim": 64, "downsample_hidden_size": 16},
    "vipllava": {"vision_feature_layer": [-2, 1]},
}
