"""Architectures with their own attention code, which takes a mask, and with positions counted along the row.

Attention and position embeddings run document by document; everything else stays packed.
"""

from trl_packfa.patches.base import ModulePatch

PATCH = ModulePatch(
    model_types=("big_bird", "megatron-bert", "mvp", "rembert", "trocr"),
    masked_mixers=(
        "BigBirdSelfAttention", "MegatronBertSelfAttention", "MvpAttention", "RemBertSelfAttention", "TrOCRAttention",
    ),
    beside=(
        "BigBirdEmbeddings", "MegatronBertEmbeddings", "MvpLearnedPositionalEmbedding", "RemBertEmbeddings",
        "TrOCRLearnedPositionalEmbedding", "TrOCRSinusoidalPositionalEmbedding",
    ),
)  # fmt: skip
