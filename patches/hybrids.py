"""Architectures with recurrent state, short convolutions or their own attention code besides packed attention.

Mixers run on their own kernels if these are shown to keep documents separate, else document by document. Attention
uses transformers' attention interface, and everything else stays packed. Without the patch, most of them mix documents
without an error, some of them also on installed kernels (transformers 5.23).
"""

from trl_packfa.patches.base import ModulePatch

PATCH = ModulePatch(
    model_types=(
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_loop_text",
        "inkling2_text", "inkling_text", "jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba",
        "mamba2", "minimax", "minimax_m3_vl_text", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv",
        "xlstm", "zamba", "zamba2", "zaya",
    ),
    mixers=(
        "BailingHybridDeltaAttention", "BambaMixer", "FalconH1Mixer", "FalconMambaMixer", "GraniteMoeHybridMambaLayer",
        "Inkling2DynamicShortConvolution", "Inkling2LoopDynamicShortConvolution", "Inkling2LoopShortConvolution",
        "Inkling2ShortConvolution", "InklingShortConvolution", "JambaMambaMixer", "KimiLinearDeltaAttention",
        "LaraMiniGatedDeltaNet", "Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv", "Mamba2Mixer", "MambaMixer",
        "MiniMaxLightningAttention", "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextPLELayer",
        "RecurrentGemmaRecurrentBlock", "RwkvFeedForward", "RwkvSelfAttention", "ZambaMambaMixer", "Zamba2MambaMixer",
        "ZayaCCAProjection", "mLSTMLayer", "xLSTMLayer",
    ),
    masked_mixers=(
        "Inkling2FullAttention", "Inkling2LoopFullAttention", "Inkling2LoopSlidingAttention",
        "Inkling2SlidingAttention", "InklingAttention", "MiniMaxM3VLAttention", "Qwen4ExpTextAttention",
        "RecurrentGemmaAttention",
    ),
    over_layers=(
        "Inkling2BlockAttentionResidual",
        "Inkling2LoopBlockAttentionResidual",
        "Inkling2LoopMessageAttentionResidual",
    ),
)  # fmt: skip
