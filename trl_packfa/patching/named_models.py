"""Decide which models may run packed by a name, `attn_implementation="packfa"`, without a patch.

transformers checks only that the name is registered. No registry sees what a model does besides attention (recurrent
state, convolutions, attention of its own). So only types whose patch changes attention alone are served. Any other
type is refused at its first call that asks for a mask or for attention, packed or not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from ..attention import BackendChoice
from ..config.options import PatchOptions
from ..errors import PackingError, UnsupportedModel
from ..layout import PackedLayout
from ..layout.call_checks import host_positions
from ..patches.base import AttentionPatch, DocumentPatch, FunctionPatch, InterfacePatch, Patch
from ..patches.registry import find_patch_for_type
from .inspect import find_parts, inner_model, model_type
from .rotary import LENGTH_DEPENDENT
from .state import PatchState

NAME = "packfa"

# Types whose patch changes attention alone, but which these registries still cannot serve. The reasons were seen in a
# small model of each type (`tests/whole/test_by_name.py` tries every type).
_NO_POSITIONS = "it does not pass position_ids on to its attention: documents given by them would see each other"
_NO_OFFSETS = "it does not pass cu_seq_lens_q on to its attention: documents given by it would see each other"
_OWN_ATTENTION = "its attention does not go through transformers' attention interface"
_NEVER_MEASURED = "it was never measured"
_NOT_BY_NAME: dict[str, str] = {
    **dict.fromkeys(
        ("cohere_compass_text", "ctrl", "fuyu", "gpt_bigcode", "moshi", "persimmon", "whisper"), _NO_POSITIONS
    ),
    **dict.fromkeys(("nemotron", "stablelm"), _NO_OFFSETS),
    **dict.fromkeys(("git", "xglm"), _OWN_ATTENTION),
    # They use the attention interface from transformers 5.24 on.
    **dict.fromkeys(("codegen", "dory", "gptj"), "it was not found exact by name"),
    "gemma4_unified": "it always builds a mask, for images",
}
_PATCH_IT = "Load it with attn_implementation='sdpa' and pass it to trl_packfa.patch(model)."

# Types with rotary embeddings whose results depend on more than differences of positions.
_POSITION_BOUND = ("beam", "hunyuan_v1_dense", "hunyuan_v1_moe")


def served_patch(model_type: str) -> Patch:
    """Return the patch of a type that is served by name; raise [`UnsupportedModel`] for any other type."""
    patch = find_patch_for_type(model_type)
    why = _NEVER_MEASURED if patch is None else _why_not_served(model_type, patch)
    if patch is None or why is not None:
        raise UnsupportedModel(
            f"attn_implementation='{NAME}' does not serve model type '{model_type}'.", why=[str(why)], do=_PATCH_IT
        )
    return patch


def _why_not_served(name: str, patch: Patch) -> str | None:
    """Return why a type is not served; `None` if its patch changes only attention, through transformers' interface."""
    if name in _NOT_BY_NAME:
        return _NOT_BY_NAME[name]
    if isinstance(patch, DocumentPatch):
        return "its documents must run one by one: it mixes tokens in ways that no single module contains"
    if patch.level == "module":
        return "not only attention mixes its tokens: it has recurrent state, convolutions or attention of its own"
    if patch.run_by_document:
        return "not only its attention needs the boundaries: it counts positions itself, or has indexers"
    own = isinstance(patch, FunctionPatch) or (isinstance(patch, AttentionPatch) and (patch.makes_mask or patch.bias))
    # A third party's patch is in no table of ours.
    return _OWN_ATTENTION if own or patch.origin != "trl_packfa" else None


def runs_by_name(model: nn.Module) -> bool:
    """Tell whether a model, or its text part, was loaded with this `attn_implementation`."""
    config: Any = inner_model(model).config
    return NAME in (config._attn_implementation, config.get_text_config()._attn_implementation)


def named_state(model: nn.Module) -> PatchState:
    """Return the state that the check reads, for a model that runs by name; the model is not changed.

    Raise [`UnsupportedModel`] if its type is not served.
    """
    config: Any = inner_model(model).config
    patch = served_patch(config.get_text_config().model_type)
    window = patch.window if isinstance(patch, InterfacePatch) else None
    asked = InterfacePatch(model_types=(model_type(model),), window=window)
    parts = find_parts(model, asked, by_name=True)
    return PatchState(asked, PatchOptions(CHOSEN.backends.name, fused_kernels=False), CHOSEN.backends, parts)


# The attention backends of all models that run by name.
CHOSEN = SimpleNamespace(backends=BackendChoice("auto"))


def use_backend(name: str) -> None:
    """Choose the attention backend of all models that run by name; raise [`NoBackend`] if there is none of this name.

    The names are `"auto"`, the default, and those of `trl-packfa env`.
    """
    CHOSEN.backends = BackendChoice(name)


def require_positions(config: Any, layout: PackedLayout, positions: Any) -> None:
    """Raise [`PackingError`] for a packed call whose positions or document lengths would change a model's results.

    Positions must restart where a model's arithmetic depends on where they begin. A document must not be so long that
    the rotary frequencies of all others change with it.
    """
    # The parameters of the rotary embeddings: one for all layers, or one for each kind of layers.
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [kind for kind in parameters.values() if kind]
    scaled = [kind for kind in kinds if kind["rope_type"] in LENGTH_DEPENDENT]
    lengths = (kind.get("original_max_position_embeddings") or config.max_position_embeddings for kind in scaled)
    most = min(lengths, default=None)
    if most is not None and layout.max_seqlen > most:
        raise PackingError(
            f"a document of {layout.max_seqlen} tokens changes the rotary frequencies of all others in its batch: "
            f"beyond {most} tokens they depend on the longest document.",
            do=f"Cut documents to {most} tokens, or load the model with attn_implementation='sdpa' and pass it to "
            "trl_packfa.patch(model), which computes each document's own.",
        )
    if kinds and most is None and config.model_type not in _POSITION_BOUND:
        return
    host = host_positions(positions, (layout.rows, layout.row_length)) if positions is not None else None
    begins = None if host is None else host.flatten()[layout.cu_seqlens[:-1].cpu().long()]
    if begins is None or not bool((begins == begins[0]).all()):
        raise PackingError(
            f"boundaries came without position_ids that restart: a {config.model_type} model's results depend on "
            "where a document begins.",
            do="Send position_ids together with cu_seq_lens_q, each document's from 0.",
        )
