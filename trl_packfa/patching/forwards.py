"""The `forward`s that a patch puts on a backbone and on the causal LM around it: they find the documents of a call.

Each calls the original forward unless the call is packed.

Shape letters: B rows, L row length, T packed tokens (B * L), N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compile import around_graphs, mark_dynamic, outside_of_graphs
from ..errors import PackingError
from ..kernels.lm_head.labelled import LabelledHead, keep_labelled
from ..kernels.lora import require_patched
from ..layout import PackedLayout
from ..layout.call_context import (
    BOUNDARIES,
    KEYWORD,
    PackedCall,
    current_call,
    empty_mask,
    in_call,
    packed_call,
)
from ..layout.from_call import layout_of, without_caches
from ..layout.padded_rows import PaddedRows, as_rows
from ..layout.shared_rows import SharedDocuments
from ..override import NamedOverride, Override, forward_signature
from ..patches.base import DocumentPatch, FunctionPatch, StackPatch
from . import cross_attention, router_loss
from .encoders import encoder_overrides
from .handed_masks import handed_masks, without_empty_masks
from .inspect import forward_takes, max_positions
from .mask_rules import embeds_token_types, refuse_token_types
from .neftune import noise_of_padded_rows
from .per_document import FOUND_BY_ITSELF, run_backbone_by_document
from .rotary import depends_on_length
from .state import PatchState
from .unpadding import SPANS, SpanLossOverride, refuse_modalities, refuse_packed


def outer_overrides(inner: PreTrainedModel, state: PatchState) -> list[Override]:
    """Make the overrides of the modules that find the boundaries: backbone and causal LM, or encoder and stack."""
    overrides = encoder_overrides(state) or _decoder_overrides(inner, state)
    if forward_takes(inner, SPANS[0]):
        before = next((override for override in reversed(overrides) if override.module is inner), None)
        overrides.append(SpanLossOverride(inner, state.unpadding, before))
    return overrides


def _decoder_overrides(inner: PreTrainedModel, state: PatchState) -> list[Override]:
    patch, unpadding, parts = state.patch, state.unpadding, state.parts
    backbone, by_document = parts.backbone, isinstance(patch, DocumentPatch)
    overrides: list[Override] = [(DocumentOverride if by_document else BackboneOverride)(backbone, state)]
    # TRL's fused head would score every position of the padded batch, pads too.
    head = None if unpadding is None or inner is backbone else LabelledHead(inner)
    if head is not None:
        overrides.append(head)
    # Most causal LMs pass further keywords on to the backbone, which finds `packed_layout` among them. Those of these
    # patches drop or refuse unknown keywords, so they get an override that reads `packed_layout` first.
    drops = patch.makes_mask or bool(patch.run_by_document) or isinstance(patch, (DocumentPatch, FunctionPatch))
    if parts.takes_images:
        overrides.append(CompositeOverride(inner, state, head))
    elif inner is not backbone and drops:
        overrides.append(CausalLMOverride(inner, state, head))
    return overrides


class _PackedForward(NamedOverride):
    """Forward of a backbone, or of the causal LM around it, that finds the documents of a packed call."""

    encoder, max_positions = False, None

    def __init__(
        self, module: nn.Module, state: PatchState, original: Callable[..., Any] | None = None, *, own_positions: bool
    ) -> None:
        super().__init__(module, original)
        self.state, self.own_positions = state, own_positions

    @outside_of_graphs
    def find_layout(self, call: dict[str, Any]) -> PackedLayout | None:
        """Return the layout of the call, or that of the causal LM around it; `None` if the call is not packed."""
        layout = layout_of(call, ignores_position_ids=self.own_positions, max_positions=self.max_positions)
        layout = current_call().layout if layout is None else layout  # set by a causal LM that passes no boundaries on
        if layout is not None:
            if self.encoder:
                refuse_packed(self.module)
            self.require_packable(call, layout)
        return layout

    def require_packable(self, call: dict[str, Any], layout: PackedLayout) -> None:
        """Raise [`PackingError`] for arguments that a packed row cannot support."""
        unpads = self.state.unpadding is not None
        instead = "patch with unpad=False" if unpads else "pass the documents as a padded batch"
        if call.get("output_attentions"):
            raise PackingError(
                "attention weights cannot be returned for a packed batch: no T x T matrix exists.",
                do=f"Pass output_attentions=False, or {instead}.",
            )
        if call.get("encoder_hidden_states") is not None:
            raise PackingError(
                "cross-attention cannot be packed: every document of a row would see the same encoder states.",
                do=f"For documents that attend to an encoder, {instead}.",
            )


class BackboneOverride(_PackedForward):
    """Forward of a backbone that finds the boundaries once, hands them to every layer, and avoids any T x T mask."""

    def __init__(self, module: nn.Module, state: PatchState) -> None:
        patch = state.patch
        self.encoder, self.makes_mask = isinstance(patch, StackPatch), patch.makes_mask
        by_document = isinstance(patch, DocumentPatch)
        # Where documents run by themselves, or rotary frequencies depend on a document's length, positions are counted
        # from 0. Other positions of the caller would be ignored, so they are refused.
        own_positions = bool(by_document or patch.beside or any(map(depends_on_length, module.modules())))
        super().__init__(module, state, own_positions=own_positions)
        self.max_positions, self.unpadding = max_positions(module), state.unpadding
        # Documents that run by themselves run under the backbone's own masks, with its own check of the types.
        self.takes_token_types = by_document or embeds_token_types(module)
        self._looked = False

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        call = current_call()
        if call.labelled is None:
            return self._run(args, kwargs)
        with in_call(replace(call, labelled=None)):  # this call's, not that of backbones below
            return keep_labelled(self._run(args, kwargs), call.labelled)

    @around_graphs
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.named(args, kwargs)  # layouts are looked for by name
        masks = handed_masks(call.get("attention_mask"))
        call = without_empty_masks(call) if masks is None else {**call, "attention_mask": masks.handed()}
        layout = self.find_layout(call)
        if layout is not None:
            shared = None if self.unpadding is None else self.unpadding.shared_documents_of(call, layout)
            return self.run_packed(call, layout) if shared is None else self.run_shared(call, shared)
        rows = self.find_rows(call)
        if rows is not None:
            return self.run_without_pads(call, rows)
        if masks is not None:
            call.pop("packed_layout", None)
            with packed_call(None):
                return self.run_unpacked((), {**call, "attention_mask": masks.make()})
        kwargs.pop("packed_layout", None)
        return self.run_unpacked(args, kwargs)

    @around_graphs
    def run_unpacked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original forward."""
        return router_loss.collect_logits(self.call_original(*args, **router_loss.request_logits(kwargs)))

    @outside_of_graphs
    def find_rows(self, call: dict[str, Any]) -> PaddedRows | None:
        """Return the rows of a padded call that runs without its pads, `None` if it runs as it is."""
        if self.unpadding is None:
            return None
        # A model with images hands its other arguments on, too; its decoder ignores those that it does not name.
        read = {name: value for name, value in call.items() if name in self.names or not self.state.parts.takes_images}
        rows = self.unpadding.rows_of(call, read)
        if rows is not None:
            self.require_packable(call, rows.layout(torch.device("cpu")))
        return rows

    def require_packable(self, call: dict[str, Any], layout: PackedLayout) -> None:
        """Refuse what this backbone cannot run in a packed row, too."""
        if not self._looked:  # at the first packed call: for modules added since the model was patched
            require_patched(self.module)
            self._looked = True
        if self.max_positions is not None and layout.max_seqlen > self.max_positions:
            raise PackingError(
                f"a document has {layout.max_seqlen} tokens, the model has {self.max_positions} positions.",
                do=f"Pass max_length={self.max_positions} or less, or cut the document.",
            )
        if layout.shard is not None:
            self.state.require_shareable(self.module, layout.shard.size)
        super().require_packable(call, layout)
        if not self.takes_token_types:
            refuse_token_types({name: value for name, value in call.items() if name in self.names})

    @around_graphs
    def run_packed(self, call: dict[str, Any], layout: PackedLayout, rows: PaddedRows | None = None) -> Any:
        """Run the original forward and give its layers the layout, and its cross-attention the padded rows."""
        arguments, packed = self._packed_call(call, layout, rows)
        with in_call(packed):
            return router_loss.collect_logits(self.call_original(**arguments))

    @around_graphs
    def run_shared(self, call: dict[str, Any], shared: SharedDocuments) -> Any:
        """Run a packed call as a row that holds each common prefix once, and put the outputs back."""
        taken = shared.take_call(call)
        for name in (*BOUNDARIES, *FOUND_BY_ITSELF):
            taken.pop(name, None)
        return shared.put_back_outputs(self.run_packed(taken, shared.layout(call["input_ids"].device)))

    @around_graphs
    def run_without_pads(self, call: dict[str, Any], rows: PaddedRows) -> Any:
        """Run a padded call as one row of its true tokens, and put the outputs back into the padded batch's shape."""
        taken, layout = self._taken(call, rows)
        unpadding: Any = self.unpadding
        with noise_of_padded_rows(self.module, unpadding.noise, rows, call["attention_mask"].device):
            outputs = self.run_packed(taken, layout, rows if unpadding.runs_by_row else None)
        return unpadding.put_back(self.call_original, call, rows, outputs)

    @outside_of_graphs
    def _taken(self, call: dict[str, Any], rows: PaddedRows) -> tuple[dict[str, Any], PackedLayout]:
        layout, masks = rows.layout(call["attention_mask"].device), handed_masks(call["attention_mask"])
        if self.unpadding.runs_by_row:  # type: ignore[union-attr]
            return cross_attention.take_call(call, rows), layout
        if self.encoder:  # `packed_mask` compares this with the mask that the model asks for
            return rows.take_call(call), layout.in_both_directions()
        spans = None if masks is None else masks.bidirectional(rows)
        if spans is None:
            return rows.take_call(call), layout
        if isinstance(self.state.patch, (DocumentPatch, FunctionPatch)) or self.state.parts.mixers:
            raise PackingError(
                f"tokens of an image see each other in {type(self.module).__name__}, which runs document by document.",
                do="Patch the model with unpad=False, or train on text alone.",
            )
        self.unpadding.bidirectional += len(spans.full) + len(spans.sliding)  # type: ignore[union-attr]
        return rows.take_call(call), layout.with_bidirectional(spans)

    @outside_of_graphs
    def _packed_call(
        self, call: dict[str, Any], layout: PackedLayout, rows: PaddedRows | None
    ) -> tuple[dict[str, Any], PackedCall]:
        device = next(call[name] for name in ("inputs_embeds", "input_ids") if call.get(name) is not None).device
        layout = layout.to(device)  # a caller's layout may lie on the host
        ids = call.get("input_ids") if self.state.invocations else None
        packed = PackedCall(layout, ids, current_call().router_logits, rows=rows)
        call = {**_packed_arguments(call, layout), "attention_mask": empty_mask(packed, device), KEYWORD: packed}
        if "token_type_ids" in self.names and call.get("token_type_ids") is None:
            call["token_type_ids"] = _types_of_long_rows(self.module, layout)
        if self.makes_mask:
            call["attention_mask"] = None  # transformers' mask interface makes the empty mask
        batch = (call.get(name) for name in ("input_ids", "inputs_embeds", "position_ids"))
        mark_dynamic(tensor for tensor in (*batch, *layout.graph_tensors) if tensor is not None)
        # If the forward takes no further arguments, the mask carries the call, see `layout/call_context.py`.
        return self._accepted(router_loss.request_logits(call)), packed

    @outside_of_graphs
    def _accepted(self, call: dict[str, Any]) -> dict[str, Any]:
        return call if self.takes_any else {name: value for name, value in call.items() if name in self.names}


def _types_of_long_rows(backbone: Any, layout: PackedLayout) -> torch.Tensor | None:
    """Return token types `(B, L)` for a row longer than the backbone's own buffer of them, else `None`."""
    # The model (BigBird) would take the first L of its own buffer, which is as long as its table of positions. A
    # packed row may be longer: only its documents must fit the table.
    own = getattr(getattr(backbone, "embeddings", None), "token_type_ids", None)
    if not isinstance(own, torch.Tensor) or layout.local_shape[1] <= own.shape[-1]:
        return None
    return own.new_zeros(layout.local_shape)


def _packed_arguments(call: dict[str, Any], layout: PackedLayout) -> dict[str, Any]:
    """Return the arguments of a packed call: always with positions, without a cache and without the layout."""
    as_rows(call, layout.local_shape)
    if call.get("position_ids") is None:
        positions = layout.position_ids()
        call["position_ids"] = positions if layout.shard is None else layout.shard.local(positions, dim=1)
    if call["position_ids"].dtype not in (torch.int32, torch.int64):  # tables of learned positions take no others
        call["position_ids"] = call["position_ids"].long()
    # Filled caches were refused before, and filling an empty one would be wasted work.
    call = {**without_caches(call), "use_cache": False}
    call.pop("packed_layout", None)  # the modules below get the whole `PackedCall`
    return call


class DocumentOverride(BackboneOverride):
    """Forward of a backbone that runs as a whole, document by document: exact for every causal backbone."""

    @around_graphs
    def run_packed(self, call: dict[str, Any], layout: PackedLayout, rows: PaddedRows | None = None) -> Any:
        """Run the backbone document by document."""
        if call.get("use_cache") is not None or "use_cache" in self.names:
            call["use_cache"] = False
        with packed_call(None):  # the calls for single documents are not packed
            call = self._accepted(router_loss.request_logits(without_caches(call)))
            return router_loss.collect_logits(run_backbone_by_document(self.call_original, call, layout))


class CausalLMOverride(_PackedForward):
    """Forward of a causal LM that does not pass all its arguments to its backbone; it finds the boundaries first."""

    # Arguments that a packed call drops: its backbone finds the boundaries in the context.
    dropped: tuple[str, ...] = (*BOUNDARIES, *FOUND_BY_ITSELF)

    def __init__(self, module: nn.Module, state: PatchState, original: Callable[..., Any] | None = None) -> None:
        super().__init__(module, state, original, own_positions=True)  # it passes no positions on
        self.__signature__ = forward_signature(module)  # `generate()` and the Trainer read it

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        if not self.state.is_applied:
            return self.call_original(*args, **kwargs)
        call = self.named(args, kwargs)
        layout = self.find_layout(call)
        if layout is not None:
            return self.run_packed(call, layout)
        kwargs.pop("packed_layout", None)
        return self.run_unpacked(args, kwargs)

    @around_graphs
    def run_unpacked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original forward; router logits are collected by its backbone's override."""
        return self.call_original(*args, **kwargs)

    @around_graphs
    def run_packed(self, call: dict[str, Any], layout: PackedLayout) -> Any:
        """Run the original forward without the boundaries."""
        with packed_call(layout):
            return self.call_original(**{name: value for name, value in call.items() if name not in self.dropped})


class CompositeOverride(CausalLMOverride):
    """Forward of a model with images or sounds whose text decoder alone is patched.

    Padded calls pass through: the decoder removes their pads after the embeddings of images and text are merged.
    Packed calls may hold text only.
    """

    dropped = (*BOUNDARIES, "attention_mask")

    @around_graphs
    def run_unpacked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original forward; masks for the decoder are only noted."""
        with packed_call(None, notes_masks=True):
            return self.call_original(*args, **kwargs)

    @around_graphs
    def run_packed(self, call: dict[str, Any], layout: PackedLayout) -> Any:
        """Run the original forward on packed text; the decoder finds the boundaries in the context.

        Raise [`PackingError`] if the call brings images or sounds, or packed rows of text are not exact.
        """
        refuse_modalities(call, "a packed row")
        if self.state.packed_refusal is not None:
            raise PackingError(
                f"{type(self.module).__name__} cannot run packed rows: {self.state.packed_refusal}",
                do="Pass padded batches, which run without their pads.",
            )
        if call.get("position_ids") is None:  # some models would count them over the whole row
            call["position_ids"] = layout.position_ids().to(layout.cu_seqlens.device)
        return super().run_packed(call, layout)
