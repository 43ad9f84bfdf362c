"""The declarations of how to pack an architecture, one class for each level. They have no code that changes a model.

Shape letters: B rows, L row length, D model dim, H head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from ..attention import AttentionArguments, Bias
from ..errors import InvalidConfig
from ..layout import PackedLayout

# torch types every attribute of a module as a tensor or a module, so attention modules are `Any` here.
Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value
QKV: TypeAlias = Callable[[Any, torch.Tensor, Any], Heads]

# Why `attn_implementation="packfa"` does not serve a type.
OWN_ATTENTION = "its attention does not go through transformers' attention interface"


def read_arguments(module: Any) -> AttentionArguments:
    """Read the attention arguments from the attributes that most of transformers' attention modules have."""
    return AttentionArguments(
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", None),
        softcap=getattr(module, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None),
        dropout=float(getattr(module, "attention_dropout", 0.0)),
    )


class Instead(NamedTuple):
    """Another patch, for models of the same types whose config a patch does not fit."""

    applies: Callable[[Any], bool]  # tells whether a model of this config gets the other patch
    patch: Patch


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The declaration of how to keep documents separate in one family of architectures: one of the classes below.

    Raises:
        [`InvalidConfig`]: if it serves no type, or names a class twice.

    Args:
        model_types (`tuple[str, ...]`):
            The `config.model_type`s that the patch is for.
        backbone (`str`, *optional*):
            Class name of the module that runs the decoder stack; transformers' own base model by default.
        instead (`Instead`, *optional*):
            The patch for some of the models, and which these are.
        origin (`str`, *optional*, defaults to `"trl_packfa"`):
            The Python package that declares the patch. Logs and errors about duplicates show it.
        not_by_name (`Mapping[str, str]`, *optional*):
            Why a type is not served by `attn_implementation="packfa"`, by model type. A type whose patch changes more
            than attention needs no reason.
    """

    level: ClassVar[str]  # names the part of the model that changes
    model_types: tuple[str, ...]
    backbone: str | None = None
    instead: Instead | None = None
    origin: str = "trl_packfa"
    not_by_name: Mapping[str, str] = field(default_factory=dict)
    # What only some of the classes below declare.
    makes_mask: bool = field(default=False, init=False)
    window: Callable[[Any], int | None] | None = field(default=None, init=False)
    beside: tuple[str, ...] = field(default=(), init=False)
    bias: Callable[[Any, torch.Tensor, PackedLayout], Bias | None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Raise [`InvalidConfig`] for a patch that serves no type."""
        if not self.model_types or isinstance(self.model_types, str):
            raise InvalidConfig(
                f"a {type(self).__name__} with model_types={self.model_types!r} serves nothing.",
                do="Pass a tuple of names: ('llama',).",
            )

    @property
    def run_by_document(self) -> tuple[str, ...]:
        """Class names of modules that run document by document."""
        return ()


@dataclass(frozen=True, kw_only=True)
class InterfacePatch(Patch):
    """A patch by transformers' attention interface.

    Args:
        window (`Callable[[Any], int | None]`, *optional*):
            Function that reads the sliding window in tokens from an attention module, for architectures that put it
            into the mask only.
        beside (`tuple[str, ...]`, *optional*):
            Class names of modules that run document by document beside attention: position embeddings, indexers.
    """

    level: ClassVar[str] = "interface"
    window: Callable[[Any], int | None] | None = None
    beside: tuple[str, ...] = ()

    @property
    def run_by_document(self) -> tuple[str, ...]:
        """Class names of modules that run document by document."""
        return self.beside


@dataclass(frozen=True, kw_only=True)
class ModulePatch(InterfacePatch):
    """A patch by transformers' attention interface of a model that mixes tokens in other modules, too.

    These run document by document, and everything else stays packed.

    Args:
        mixers (`tuple[str, ...]`, *optional*):
            Class names of modules that mix tokens instead of attention (recurrent state, short convolutions). They run
            on their own kernels if these are shown to keep documents separate, else document by document.
        masked_mixers (`tuple[str, ...]`, *optional*):
            Class names of modules with their own attention code. They run document by document, with a causal mask of
            the document's size.
        over_layers (`tuple[str, ...]`, *optional*):
            Class names of modules that attend over layers and not over tokens. They are not changed.
    """

    level: ClassVar[str] = "module"
    mixers: tuple[str, ...] = ()
    masked_mixers: tuple[str, ...] = ()
    over_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise [`InvalidConfig`] for a class that would run in two ways, too."""
        super().__post_init__()
        if twice := sorted(name for name, count in Counter(self.run_by_document).items() if count > 1):
            raise InvalidConfig(
                f"a patch for {', '.join(self.model_types[:3])} names {', '.join(twice)} twice.",
                do="Name each class in only one of mixers, masked_mixers and beside.",
            )

    @property
    def run_by_document(self) -> tuple[str, ...]:
        """Class names of modules that run document by document."""
        return (*self.mixers, *self.masked_mixers, *self.beside)


@dataclass(frozen=True, kw_only=True)
class FunctionPatch(Patch):
    """A patch of older architectures with their own form of an attention interface, level `interface`.

    Args:
        functions (`Mapping[str, str]`):
            Methods that a backend replaces, by attention class name. The method maps `(query (B, N, L, H), key, value,
            mask)` to `(output (B, N, L, H), weights)`.
        arguments (`Callable`):
            Function that reads the [`AttentionArguments`] from an attention module.
    """

    level: ClassVar[str] = "interface"
    functions: Mapping[str, str]
    arguments: Callable[[Any], AttentionArguments]


@dataclass(frozen=True, kw_only=True)
class AttentionPatch(Patch):
    """A patch that replaces the forward of attention modules, level `attention`.

    Args:
        attention (`Mapping[str, QKV]`):
            Functions by attention class name. A function maps `(module, hidden_states (B, L, D), position_embeddings)`
            to `query`, `key`, `value` of shape `(B, L, heads, H)`, rotated and normalized; it computes everything
            before the attention itself.
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
    """

    level: ClassVar[str] = "attention"
    attention: Mapping[str, QKV]
    output: str = "o_proj"
    finish: Callable[[Any, torch.Tensor, tuple[Any, ...]], Any] | None = None
    arguments: Callable[[Any], AttentionArguments] = read_arguments
    bias: Callable[[Any, torch.Tensor, PackedLayout], Bias | None] | None = None
    makes_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class DocumentPatch(Patch):
    """A patch of architectures that mix tokens in other ways: the whole backbone runs document by document."""

    level: ClassVar[str] = "document"


@dataclass(frozen=True, kw_only=True)
class EncoderPatch(Patch):
    """A patch for padded batches alone: one of the two classes below."""


@dataclass(frozen=True, kw_only=True)
class StackPatch(EncoderPatch):
    """A patch that runs the stack of layers of an encoder without pads: embeddings and pooling see the padded batch.

    Tokens see their document in the direction of the mask that the model asks for.
    """

    level: ClassVar[str] = "stack"
    makes_mask: bool = field(default=True, init=False)


@dataclass(frozen=True, kw_only=True)
class GroupsPatch(EncoderPatch):
    """A patch that runs padded batches in groups of rows of similar length, with the model's own code."""

    level: ClassVar[str] = "groups"
