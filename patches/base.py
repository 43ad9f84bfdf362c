"""What a patch says about an architecture: a declaration, no code that touches a model.

Shape letters: B rows, L row length, D model dim, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeAlias

import torch

from ..attention import AttentionArguments, Bias
from ..errors import InvalidConfig
from ..layout import PackedLayout

# torch types every attribute of a module as a tensor or a module, so attention modules are `Any` here.
QKV: TypeAlias = Callable[[Any, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def read_arguments(module: Any) -> AttentionArguments:
    """The arguments as most transformers attention modules store them on themselves."""
    return AttentionArguments(
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", None),
        softcap=getattr(module, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None),
        dropout=float(getattr(module, "attention_dropout", 0.0)),
    )


@dataclass(frozen=True, kw_only=True)
class Patch:
    """How to make one family of architectures honour document boundaries.

    Raises:
        [`InvalidConfig`]: for fields that contradict each other.

    Args:
        model_types (`tuple[str, ...]`):
            The `config.model_type`s it serves.
        backbone (`str`, *optional*):
            Class name of the module that runs the decoder stack; transformers' own base model by default.
        attention (`Mapping[str, QKV]`, *optional*):
            Where the attention forward is rewritten, level `attention`: for each attention class by name, the function
            `(module, hidden_states (B, L, D), position_embeddings)` to `query`, `key`, `value` of shape
            `(B, L, heads, H)`, rotated and normalized: everything before the attention itself. Without it, the patch
            goes through transformers' attention interface, level `interface`.
        output (`str`, *optional*, defaults to `"o_proj"`):
            Name of the output projection of an attention module.
        finish (`Callable`, *optional*):
            `(module, attended (B, L, N * H), positional arguments)` to what the attention module returns; by default
            the output projection and no weights.
        arguments (`Callable`, *optional*):
            Reads the [`AttentionArguments`] off an attention module.
        bias (`Callable`, *optional*):
            `(module, value (T, K, H), layout)` to what is added to the scores (ALiBi).
        makes_mask (`bool`, *optional*, defaults to `False`):
            The backbone computes with the mask it is handed: hand it none, and let transformers' mask interface make
            the packed call's empty one.
        functions (`Mapping[str, str]`, *optional*):
            Older architectures' own form of an attention interface: for each attention class by name, the method
            `(query (B, N, L, H), key, value, mask)` to `(output (B, N, L, H), weights)` that is served by a backend.
        window (`Callable[[Any], int | None]`, *optional*):
            Reads the sliding window in tokens off an attention module, where only the mask knows it.
        mixers (`tuple[str, ...]`, *optional*):
            Class names of modules that mix tokens instead of attention (recurrent state, short convolutions), level
            `module`: on their own kernels where those provably honour boundaries, else document by document, with
            everything else packed.
        masked_mixers (`tuple[str, ...]`, *optional*):
            The same for attention with code of its own: document by document, under a causal mask of their size.
        beside (`tuple[str, ...]`, *optional*):
            Class names of what runs document by document beside the attention: position embeddings, indexers.
        over_layers (`tuple[str, ...]`, *optional*):
            Class names of modules that attend over layers, not over tokens: they are left alone.
        rebatch (`bool`, *optional*, defaults to `False`):
            Run the whole backbone document by document, level `rebatch`, for what mixes tokens in other ways.
        serves (`Callable[[Any], bool]`, *optional*):
            Whether the patch is for a model of this config; `otherwise` is for the others.
        otherwise (`Patch`, *optional*):
            The patch where this one does not serve.
        origin (`str`, *optional*, defaults to `"trl_packfa"`):
            The Python package that declares the patch, shown in logs and in duplicates' errors.
    """

    model_types: tuple[str, ...]
    backbone: str | None = None
    attention: Mapping[str, QKV] = field(default_factory=dict)
    output: str = "o_proj"
    finish: Callable[[Any, torch.Tensor, tuple[Any, ...]], Any] | None = None
    arguments: Callable[[Any], AttentionArguments] = read_arguments
    bias: Callable[[Any, torch.Tensor, PackedLayout], Bias | None] | None = None
    makes_mask: bool = False
    functions: Mapping[str, str] = field(default_factory=dict)
    window: Callable[[Any], int | None] | None = None
    mixers: tuple[str, ...] = ()
    masked_mixers: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    over_layers: tuple[str, ...] = ()
    rebatch: bool = False
    serves: Callable[[Any], bool] | None = None
    otherwise: Patch | None = None
    origin: str = "trl_packfa"

    def __post_init__(self) -> None:
        """A field that the others make meaningless is an error, where it would be ignored.

        Raises:
            [`InvalidConfig`]: naming the fields.
        """
        if not self.model_types or isinstance(self.model_types, str):
            raise InvalidConfig(
                f"a Patch with model_types={self.model_types!r} serves nothing.", do="Name them: ('llama',)."
            )
        # What differs from its default was given: dataclasses do not tell a default that was passed.
        given = {f.name for f in fields(self) if getattr(self, f.name) != _default(f)}
        for applies, what, why in _CONTRADICTIONS:
            if applies(given) and (ignored := sorted(given.intersection(what))):
                raise InvalidConfig(
                    f"a Patch for {', '.join(self.model_types[:3])} with {', '.join(ignored)}, which {why}.",
                    do="Drop what is ignored.",
                )
        if ("serves" in given) != ("otherwise" in given):
            raise InvalidConfig(
                f"a Patch for {', '.join(self.model_types[:3])} with one of 'serves' and 'otherwise'.",
                why=["'serves' says which models it is for, 'otherwise' what serves the others"],
                do="Give both, or none.",
            )
        twice = sorted({*self.mixers} & {*self.masked_mixers} | {*self.beside} & {*self.mixers, *self.masked_mixers})
        if twice:
            raise InvalidConfig(
                f"a Patch for {', '.join(self.model_types[:3])} names {', '.join(twice)} twice.",
                do="A class is a mixer, a masked mixer, or runs beside the attention.",
            )

    @property
    def level(self) -> str:
        """`attention`: its forward is rewritten; `interface`: it goes through transformers' attention interface;
        `module`: what is no attention runs document by document; `rebatch`: the whole backbone does."""
        if self.rebatch:
            return "rebatch"
        # Not `beside`: position embeddings by document leave the attention at its level.
        if self.mixers or self.masked_mixers:
            return "module"
        return "attention" if self.attention else "interface"


def _default(spec: Field[Any]) -> Any:
    return spec.default if spec.default_factory is MISSING else spec.default_factory()


# (applies, which fields are meaningless then, why): `applies` is told which fields are not their defaults.
_CONTRADICTIONS: tuple[tuple[Callable[[set[str]], bool], tuple[str, ...], str], ...] = (
    (
        lambda given: "rebatch" in given,
        ("attention", "functions", "window", "arguments", "output", "finish", "bias", "makes_mask", "mixers",
         "masked_mixers", "beside", "over_layers"),
        "rebatch=True ignores: the whole backbone runs document by document",
    ),
    (
        lambda given: "attention" in given,
        ("functions", "window"),
        "attention ignores: its forward is rewritten, and 'arguments' reads the window",
    ),
    (
        lambda given: "attention" not in given,
        ("output", "finish", "bias"),
        "nothing reads without attention",
    ),
    (
        lambda given: not given.intersection(("attention", "functions")),
        ("arguments",),
        "nothing reads without attention or functions: transformers' interface is told",
    ),
)  # fmt: skip
