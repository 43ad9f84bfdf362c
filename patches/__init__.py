"""The built-in patches, one file per modelling folder of transformers or per way of mixing tokens.

The tuple `PATCHES` lists all supported architectures.
"""

from trl_packfa.patches import (
    bloom,
    by_document,
    doge,
    falcon,
    gemma2,
    gemma3,
    git,
    gpt_neo,
    gpt_neox_japanese,
    gptj,
    granite,
    hybrids,
    interface,
    llama,
    mistral,
    mpt,
    own_attention,
    phi,
    phi3,
    positions,
    qwen2,
    qwen3,
    sparse,
    windows,
    xglm,
)
from trl_packfa.patches.base import Patch

PATCHES: tuple[Patch, ...] = (
    llama.PATCH, mistral.PATCH, granite.PATCH, phi.PATCH, phi3.PATCH, qwen2.PATCH, qwen3.PATCH, gemma2.PATCH,
    gemma3.PATCH, bloom.PATCH, doge.PATCH, falcon.PATCH, git.PATCH, mpt.PATCH, xglm.PATCH, interface.PATCH,
    windows.PATCH, gptj.PATCH, gpt_neo.PATCH, gpt_neox_japanese.PATCH, positions.PATCH, sparse.PATCH, hybrids.PATCH,
    own_attention.PATCH, by_document.PATCH,
)  # fmt: skip
