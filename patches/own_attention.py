"""Architectures with their own attention code, which takes a mask; some count positions along the row, too.

Attention and position embeddings run document by document; everything else stays packed.
"""

from trl_packfa.patches.base import ModulePatch

PATCH = ModulePatch(
    model_types=(
        "big_bird", "git", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mvp", "rembert", "trocr",
    ),
    masked_mixers=(
        "BigBirdSelfAttention", "GPTNeoSelfAttention", "GPTNeoXJapaneseAttention", "GitSelfAttention",
        "MegatronBertSelfAttention", "MvpAttention", "RemBertSelfAttention", "TrOCRAttention",
    ),
    beside=(
        "BigBirdEmbeddings", "MegatronBertEmbeddings", "MvpLearnedPositionalEmbedding", "RemBertEmbeddings",
        "TrOCRLearnedPositionalEmbedding", "TrOCRSinusoidalPositionalEmbedding",
    ),
)  # fmt: skip
