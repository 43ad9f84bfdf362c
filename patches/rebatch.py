"""Architectures that mix tokens in ways that no single module contains: byte patches, compressed keys, temperatures
that depend on the place in the row, relative positions computed once for all layers.

Their backbone runs document by document, in right-padded batches of similar lengths: exact for whatever is causal,
with no kernel, on any device, at the cost of the padding inside a batch. Listed is what passes the exactness check as
a small random model; `tests/whole/test_architectures.py` keeps it so.
"""

from trl_packfa.patches.base import Patch

PATCH = Patch(
    rebatch=True,
    model_types=(
        "blt",
        "deepseek_v4",
        "llama4",
        "llama4_text",
        "openai-gpt",
        "roformer",
        "xlm",
        "xlnet",
    ),
)
