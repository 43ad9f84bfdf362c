"""Architectures that run their whole backbone document by document.

They mix tokens in several modules: byte patches, compressed keys, temperatures that depend on the position in the row,
relative positions that are computed once for all layers. The backbone runs in right-padded batches of documents of
similar length. This is exact for every causal model, needs no kernel and works on any device; its cost is the padding.
"""

from trl_packfa.patches.base import DocumentPatch

PATCH = DocumentPatch(
    model_types=(
        "blt", "deepseek_v4", "llama4", "llama4_text", "openai-gpt", "roformer", "xlm", "xlnet",
    ),
)  # fmt: skip
