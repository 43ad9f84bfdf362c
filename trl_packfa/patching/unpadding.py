"""Decide which padded calls of a patched backbone run without their pads, and count the tokens that this saves.

Shape letters: B rows, L row length, T true tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import InvalidLayout, PackingError
from ..layout import PackedLayout
from ..layout.from_call import has_cache
from ..layout.padded_rows import PaddedRows, as_rows, rows_of
from ..layout.shared_rows import SharedDocuments
from ..runtime.compile import outside_of_graphs
from ..runtime.neftune import EmbeddingNoise
from .sharing import Sharing

logger = logging.getLogger(__name__)

# Arguments of other modalities. The model itself finds their places in the row.
_MODALITIES = re.compile(r"pixel|image|video|audio|speech|vision|input_features")

# Gets the backbone's unpatched forward, the call's arguments, its rows and its outputs.
Watch: TypeAlias = "Callable[[Callable[..., Any], dict[str, Any], PaddedRows, Any], None]"


class Unpadding:
    """Policy for one backbone: which of its padded calls run as one row of their true tokens. It also counts them.

    A model that `generates` may be used for decoding: a call without gradients whose config asks for a cache then gets
    the cache and runs with its pads.

    Attributes:
        is_on (`bool`): whether calls run without pads; off while padded calls are measured.
        sharing ([`Sharing`] or `None`): the policy that decides which rows share a prefix.
        runs_by_row (`frozenset[str]`): arguments of cross-attention to images, which runs on padded rows.
        calls (`int`): calls that ran without their pads so far.
        tokens, pads, documents (`int`): true tokens, pads and rows with tokens of all masks so far.
        trained, trained_documents (`int`): true tokens and rows of calls with gradients.
        shared (`int`): true tokens that were not computed, because another row has the same prefix.
        blocks (`int`): blocks of tokens that saw each other in both directions, of layers with and without a window.
        takes_left (`bool`): whether rows padded on the left run without their pads; the proof finds it.
        watch (`Callable` or `None`): called for every call that runs without its pads, see [`Watch`].
    """

    def __init__(self, sharing: Sharing | None, *, generates: bool, runs_by_row: frozenset[str]) -> None:
        self.is_on, self.sharing, self.generates = True, sharing, generates
        self.calls, self.tokens, self.pads, self.documents = 0, 0, 0, 0
        self.trained, self.trained_documents, self.shared, self.blocks = 0, 0, 0, 0
        self.takes_left = True
        self.watch: Watch | None = None
        self.noise = EmbeddingNoise(0.0)
        self.runs_by_row = runs_by_row
        self._told: frozenset[str] = frozenset()

    def rows_of(self, call: dict[str, Any], read: dict[str, Any], module: nn.Module) -> PaddedRows | None:
        """Return the rows of a call that runs without its pads, `None` if it runs as it is.

        A call runs as it is if it has no pads and its rows share nothing, or if it uses or asks for a cache. `read`
        are the arguments that the module reads. Raise [`PackingError`] if the call brings images or other modalities.
        Raise [`InvalidLayout`] if a row has pads among its tokens, or the mask covers tokens of an earlier call whose
        cache is not there.
        """
        embedded = call.get("inputs_embeds")
        tokens, mask = call.get("input_ids") if embedded is None else embedded, call.get("attention_mask")
        if not self.is_on or not isinstance(mask, torch.Tensor) or tokens is None or tokens.dim() < 2:
            return None
        if mask.dim() != 2 or has_cache(call):
            return None
        if mask.shape != tokens.shape[:2]:
            # This call continues from a cache, which an earlier call without pads did not return.
            if mask.shape[0] == tokens.shape[0] and mask.shape[1] > tokens.shape[1]:
                lost = "an earlier padded call ran without its pads and returned no cache: its tokens would be ignored"
                raise InvalidLayout(
                    f"an attention_mask of {mask.shape[1]} columns came with {tokens.shape[1]} tokens and no cache.",
                    why=[lost],
                    do="Decode under torch.no_grad(), or pass use_cache=True in the first call.",
                )
            return None
        if self._asks_for_cache(call, module):
            if module.training and torch.is_grad_enabled():
                self._tell_once(
                    "trl-packfa: padded calls of %s ask for a cache (use_cache=True), so they run with their pads. "
                    "Set use_cache=False to train without them.",
                    module,
                )
            return None
        rows = rows_of(mask)
        if not self.takes_left and any(rows.starts):
            self._tell_once(
                "trl-packfa: rows padded on the left run with their pads in %s: its pooling reads the first column of "
                "a row. Set tokenizer.padding_side='right'.",
                module,
            )
            return None
        as_rows(call, rows.shape)
        self._count(rows)
        # Equal tokens of two rows may stand for different images.
        has_images = _modalities(read) or any(read.get(name) is not None for name in self.runs_by_row)
        shared = None if self.sharing is None or has_images else self.sharing.rows_of(call, rows, module)
        if shared is not None:
            self.shared += shared.num_tokens - shared.num_packed
            return shared
        # A batch without pads counts as well, if a re-cut step's rows have other lengths than in the padded run.
        if not rows.num_tokens or not (rows.num_pads or rows.widths):
            return None
        # Checked last: a batch of images without pads runs as it is.
        images = {name: value for name, value in read.items() if not _marks_tokens(value, rows)}
        refuse_modalities(images, "a batch without its pads")
        _refuse_other_rows(read, rows, self.runs_by_row)
        return rows

    @outside_of_graphs
    def shared_documents_of(
        self, call: dict[str, Any], layout: PackedLayout, module: nn.Module
    ) -> SharedDocuments | None:
        """Return the documents of a packed call with each common prefix once, `None` if none is shared."""
        if self.sharing is None or layout.shard is not None:  # the prefix may lie on another process
            return None
        shared = self.sharing.documents_of(call, layout, module)
        if shared is not None:
            self.shared += shared.num_tokens - shared.num_packed
        return shared

    def _asks_for_cache(self, call: dict[str, Any], module: nn.Module) -> bool:
        """Tell whether a call is to return a cache.

        A call that does not say follows its config, which asks for one by default. Training does not read the cache,
        but a call without gradients may be the first of a decoding loop.
        """
        asked = call.get("use_cache")
        if asked is not None or torch.is_grad_enabled() or not self.generates:
            return asked is True
        return getattr(getattr(module, "config", None), "use_cache", None) is True

    def _tell_once(self, text: str, module: nn.Module) -> None:
        """Log a warning about a module, each text once."""
        if text not in self._told:
            self._told |= {text}
            logger.warning(text, type(module).__name__)

    def _count(self, rows: PaddedRows) -> None:
        self.tokens += rows.num_tokens
        self.pads += rows.num_pads
        documents = sum(length > 0 for length in rows.lengths)
        self.documents += documents
        if torch.is_grad_enabled():
            self.trained += rows.num_tokens
            self.trained_documents += documents

    def note(self, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any) -> None:
        """Count a call that ran without its pads, and pass it to `watch` with the backbone's unpatched `forward`."""
        self.calls += 1
        if self.watch is not None:
            self.watch(forward, call, rows, outputs)

    def off(self) -> AbstractContextManager[None]:
        """Make padded calls run with their pads, inside a `with` block."""
        return self._set(is_on=False)

    def unshared(self) -> AbstractContextManager[None]:
        """Make rows share no prefixes, inside a `with` block."""
        return self._set(sharing=None)

    @contextmanager
    def _set(self, **values: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


def _modalities(call: dict[str, Any]) -> list[str]:
    """Return the names of the arguments with images or sounds."""
    return [name for name, value in call.items() if _MODALITIES.search(name) and value is not None]


def _marks_tokens(value: Any, rows: PaddedRows) -> bool:
    """Tell whether an argument marks tokens of the rows, as those of images: it is converted with them."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool and rows.row_axis(value) == 0


def _refuse_other_rows(call: dict[str, Any], rows: PaddedRows, runs_by_row: frozenset[str]) -> None:
    """Raise [`PackingError`] for arguments with a part for each row that is not a part for each token.

    Their rows would be mixed up. An example are the encoder states `(B, E, D)` of cross-attention. Those of
    cross-attention to images run by row.
    """
    count, length = rows.shape
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    # Positions of three kinds for three rows, `(3, 3, L)`, are for each token.
    others = {name: value for name, value in tensors.items() if rows.row_axis(value) is None}
    others = {name: value for name, value in others.items() if name not in runs_by_row}
    found = [name for name, value in others.items() if value.shape[0] == count and value.shape[1] != length]
    if found and count > 1:
        raise PackingError(
            f"a batch without its pads cannot hold {', '.join(sorted(found))}.",
            why=["it has a part for each row, and without pads all rows are one"],
            do="Patch the model with unpad=False.",
        )


def refuse_modalities(call: dict[str, Any], what: str) -> None:
    """Raise [`PackingError`] for images and sounds where the model would look for their places in padded rows."""
    if brought := _modalities(call):
        raise PackingError(
            f"{what} cannot hold {', '.join(brought)} in this model.",
            why=["the model finds the places of images and sounds in padded rows"],
            do="Pass a padded batch to a model patched with unpad=False, or train on text alone.",
        )


def refuse_packed(module: nn.Module) -> None:
    """Raise [`PackingError`]: an encoder cannot run packed rows."""
    raise PackingError(
        f"{type(module).__name__} cannot run packed rows.",
        why=["an encoder computes positions and pooling by row, so a packed row would be one text"],
        do="Pass a padded batch with its attention_mask; it runs without its pads.",
    )
