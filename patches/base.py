"""`Patch`: the declaration of how to pack an architecture. It has no code that changes a model.

Shape letters: B rows, L row length, D model dim, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeAlias

import torch

from ..attention import AttentionArguments, Bias
from ..errors import InvalidConfig
from ..layout import PackedLayout

# torch types every attribute of a module as a tensor or a module, so attention modules are `Any` here.
Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value
QKV: TypeAlias = Callable[[Any, torch.Tensor, Any], Heads]


def read_arguments(module: Any) -> AttentionArguments:
    """Read the attention arguments from the attributes that most of transformers' attention modules have."""
    return AttentionArguments(
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", None),
        softcap=getattr(module, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None),
        dropout=float(getattr(module, "attention_dropout", 0.0)),
    )


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The declaration of how to keep documents separate in one family of architectures.

    Raises:
        [`InvalidConfig`]: if fields contradict each other.

    Args:
        model_types (`tuple[str, ...]`):
            The `config.model_type`s that the patch is for.
        backbone (`str`, *optional*):
            Class name of the module that runs the decoder stack; transformers' own base model by default.
        attention (`Mapping[str, QKV]`, *optional*):
            Functions that replace the attention forward, by attention class name (level `attention`). A function maps
            `(module, hidden_states (B, L, D), position_embeddings)` to `query`, `key`, `value` of shape
            `(B, L, heads, H)`, rotated and normalized; it computes everything before the attention itself. Without
            this field, the patch uses transformers' attention interface (level `interface`).
        output (`str`, *optional*, defaults to `"o_proj"`):
            Name of the output projection of an attention module.
        finish (`Callable`, *optional*):
            Function from `(module, attended (B, L, N * H), positional arguments)` to the result of the attention
            module; by default the output projection and no weights.
        arguments (`Callable`, *optional*):
            Function that reads the [`AttentionArguments`] from an attention module.
        bias (`Callable`, *optional*):
            Function from `(module, value (T, K, H), layout)` to the term that is added to the scores (ALiBi).
        makes_mask (`bool`, *optional*, defaults to `False`):
            Whether the backbone computes with the attention mask that it gets. If so, a packed call passes no mask,
            and transformers' mask interface makes the empty mask of the packed call.
        functions (`Mapping[str, str]`, *optional*):
            Methods that a backend replaces, by attention class name, for older architectures with their own form of
            an attention interface. The method maps `(query (B, N, L, H), key, value, mask)` to
            `(output (B, N, L, H), weights)`.
        window (`Callable[[Any], int | None]`, *optional*):
            Function that reads the sliding window in tokens from an attention module, for architectures that put it
            into the mask only.
        mixers (`tuple[str, ...]`, *optional*):
            Class names of modules that mix tokens instead of attention (recurrent state, short convolutions), level
            `module`. They run on their own kernels if these are proven to keep documents separate, else document by
            document. Everything else stays packed.
        masked_mixers (`tuple[str, ...]`, *optional*):
            Class names of modules with their own attention code, level `module`. They run document by document, with
            a causal mask of the document's size.
        beside (`tuple[str, ...]`, *optional*):
            Class names of other modules that run document by document: position embeddings, indexers.
        over_layers (`tuple[str, ...]`, *optional*):
            Class names of modules that attend over layers and not over tokens. They are not changed.
        rebatch (`bool`, *optional*, defaults to `False`):
            Run the whole backbone document by document, level `rebatch`, if it mixes tokens in other ways.
        encoder (`bool`, *optional*, defaults to `False`):
            Run the stack of layers of an encoder without pads, level `stack`: embeddings and pooling see the padded
            batch. Tokens see their document in the direction of the mask that the model asks for.
        by_length (`bool`, *optional*, defaults to `False`):
            Run padded batches in groups of rows of similar length, level `groups`, with the model's own code and
            fewer pads.
        serves (`Callable[[Any], bool]`, *optional*):
            Function that tells whether the patch is for a model with this config.
        otherwise (`Patch`, *optional*):
            The patch for models that `serves` excludes.
        origin (`str`, *optional*, defaults to `"trl_packfa"`):
            The Python package that declares the patch. Logs and errors about duplicates show it.
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
    encoder: bool = False
    by_length: bool = False
    serves: Callable[[Any], bool] | None = None
    otherwise: Patch | None = None
    origin: str = "trl_packfa"

    def __post_init__(self) -> None:
        """Raise [`InvalidConfig`] for fields that other fields make meaningless."""
        if not self.model_types or isinstance(self.model_types, str):
            raise InvalidConfig(
                f"a Patch with model_types={self.model_types!r} serves nothing.",
                do="Pass a tuple of names: ('llama',).",
            )
        # A field counts as given if it differs from its default, because dataclasses do not tell which were passed.
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        given = {name for name, default in defaults.items() if getattr(self, name) != default}
        for applies, what, why in _CONTRADICTIONS:
            if applies(given) and (ignored := sorted(given.intersection(what))):
                raise InvalidConfig(
                    f"a Patch for {', '.join(self.model_types[:3])} sets fields without effect "
                    f"({', '.join(ignored)}): {why}.",
                    do="Remove these fields.",
                )
        if ("serves" in given) != ("otherwise" in given):
            raise InvalidConfig(
                f"a Patch for {', '.join(self.model_types[:3])} sets only one of 'serves' and 'otherwise'.",
                why=["'serves' tells which models the patch is for, 'otherwise' is the patch for the other models"],
                do="Set both, or none.",
            )
        twice = sorted({*self.mixers} & {*self.masked_mixers} | {*self.beside} & {*self.mixers, *self.masked_mixers})
        if twice:
            raise InvalidConfig(
                f"a Patch for {', '.join(self.model_types[:3])} names {', '.join(twice)} twice.",
                do="Name each class in only one of mixers, masked_mixers and beside.",
            )

    @property
    def level(self) -> str:
        """Level of the patch, which names the part of the model that changes.

        `attention` replaces attention forwards. `interface` uses transformers' attention interface. `module` runs
        mixers document by document. `rebatch` runs the whole backbone document by document. `stack` runs an encoder's
        layers without pads, `groups` runs rows of similar length together; both serve padded batches only.
        """
        for level, is_chosen in {"rebatch": self.rebatch, "stack": self.encoder, "groups": self.by_length}.items():
            if is_chosen:
                return level
        # `beside` does not count, because position embeddings do not change how attention runs.
        if self.mixers or self.masked_mixers:
            return "module"
        return "attention" if self.attention else "interface"


# Entries (applies, fields, why): if `applies` is true of the set of given fields, the other `fields` are meaningless.
_CONTRADICTIONS: tuple[tuple[Callable[[set[str]], bool], tuple[str, ...], str], ...] = (
    (
        lambda given: "encoder" in given or "by_length" in given,
        ("attention", "functions", "window", "arguments", "output", "finish", "bias", "makes_mask", "mixers",
         "masked_mixers", "beside", "rebatch"),
        "an encoder's padded batches run through its stack of layers, or in groups of rows",
    ),
    (
        lambda given: "rebatch" in given,
        ("attention", "functions", "window", "arguments", "output", "finish", "bias", "makes_mask", "mixers",
         "masked_mixers", "beside", "over_layers"),
        "rebatch=True runs the whole backbone document by document",
    ),
    (
        lambda given: "attention" in given,
        ("functions", "window"),
        "'attention' replaces the attention forward, and 'arguments' reads the window",
    ),
    (
        lambda given: "attention" not in given,
        ("output", "finish", "bias"),
        "they are read only together with 'attention'",
    ),
    (
        lambda given: not given.intersection(("attention", "functions")),
        ("arguments",),
        "they are read only with 'attention' or 'functions', because transformers' interface passes arguments",
    ),
)  # fmt: skip
