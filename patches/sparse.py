"""Architectures with an indexer that chooses the keys of each query (DeepSeek sparse attention).

The indexer runs document by document. Attention uses transformers' attention interface. It is dense if a document has
no more tokens than a query may attend to.
"""

from trl_packfa.patches.base import InterfacePatch

PATCH = InterfacePatch(
    model_types=(
        "axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text",
        "mistral_large4_text",
    ),
    beside=(
        "AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "HYV4Indexer",
        "HYV4VLIndexer", "MistralLarge4TextIndexer",
    ),
)  # fmt: skip
