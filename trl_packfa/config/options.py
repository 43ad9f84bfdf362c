"""The options of a patch. `patch`, `padding_free`, the configs of all trainers and `trl-packfa check` share them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import InvalidConfig


@dataclass(frozen=True)
class PatchOptions:
    """Options of [`trl_packfa.patch`], with their defaults and their help.

    Raises [`InvalidConfig`] if `share_prefixes` comes without `unpad`.
    """

    backend: str = field(
        default="auto",
        metadata={
            "help": "Attention backend: `'auto'`, or a name that `trl-packfa env` lists. A named backend is used, or "
            "an error says why it cannot be."
        },
    )
    fused_kernels: bool = field(
        default=True,
        metadata={
            "help": "Compute a LoRA layer together with its base layer. On CUDA with liger-kernel installed, compute "
            "norms, rotary embeddings and SwiGLU by its kernels. `False` runs the model's and PEFT's own code."
        },
    )
    unpad: bool = field(
        default=False,
        metadata={"help": "Compute padded batches as one row of their real tokens, and check that this is exact."},
    )
    share_prefixes: bool = field(
        default=False,
        metadata={
            "help": "Compute a prefix that several rows or documents of a micro-batch share only once: a pair's "
            "prompt, a system prompt, the history of a conversation. A shared prefix needs 16 tokens or more. Models "
            "that mix tokens outside of attention run each row by itself, and a warning says so."
        },
    )

    def __post_init__(self) -> None:
        if self.share_prefixes and not self.unpad:
            raise InvalidConfig(
                "share_prefixes=True needs unpad=True: shared prefixes are found while padding is removed.",
                do="Pass unpad=True as well.",
            )


def option(name: str) -> Any:
    """Return an option as the field of a config: the same default and help."""
    found = next(f for f in fields(PatchOptions) if f.name == name)
    return field(default=found.default, metadata=dict(found.metadata))
