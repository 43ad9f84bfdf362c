"""Architectures that are packed by transformers' attention interface and need no other patch.

Tokens mix only in an attention function. It gets query, key, value, scale, window, softcap and sinks, and the patch
adds the document boundaries. Without the patch, some types attend across documents without an error: afmoe, biogpt,
gpt_oss and opt build their masks without `position_ids` (transformers 5.23).
"""

from trl_packfa.patches.base import InterfacePatch

PATCH = InterfacePatch(
    model_types=(
        "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere",
        "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3",
        "diffllama", "dots1", "dory", "emu3", "emu3_text_model", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
        "flex_olmo", "flint", "fuyu", "gemma", "gemma3", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
        "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2", "gpt-sw3", "gpt2",
        "gpt_bigcode", "gpt_neox", "gpt_oss", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
        "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder",
        "jais2", "jetmoe", "kolibri1", "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
        "ministral", "ministral3", "mixtral", "mllama", "mllama_text_model", "modernbert-decoder", "moshi",
        "moss_transcribe_diarize", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon",
        "phi4_multimodal", "qwen3_moe", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
        "starcoder2", "vaultgemma", "whisper", "youtu",
    ),
    not_by_name=dict.fromkeys(
        ("nemotron", "stablelm"),
        "it does not pass cu_seq_lens_q on to its attention: documents given by it would see each other",
    ),
)  # fmt: skip
