"""Architectures whose attention sees only the keys that an indexer chooses (DeepSeek sparse attention).

The indexer runs document by document; the attention goes through transformers' interface, and is dense for documents
no longer than the number of keys it may see.
"""

from trl_packfa.patches.base import Patch

PATCH = Patch(
    model_types=("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    beside=(
        "AXK2Indexer",
        "DeepseekV32Indexer",
        "Dots3NoteTextIndexer",
        "GlmMoeDsaIndexer",
        "HYV4Indexer",
    ),
)
