"""Decide which padded calls of a patched backbone run without their pads, and which rows share a common prefix.

Shape letters: B rows, L row length, T true tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..compile import around_graphs, outside_of_graphs
from ..errors import ContaminationError, InvalidLayout, PackingError, UnsupportedModel
from ..layout import PackedLayout
from ..layout.from_call import has_cache, layout_of
from ..layout.padded_rows import PaddedRows, as_rows, rows_of
from ..layout.shared_rows import SharedDocuments, SharedRows, shared_documents_of, shared_rows_of
from ..override import NamedOverride, forward_signature, set_inside
from .inspect import inner_model, own_config
from .neftune import EmbeddingNoise

logger = logging.getLogger(__name__)

# Arguments of other modalities. The model itself finds their places in the row.
_MODALITIES = re.compile(r"pixel|image|video|audio|speech|vision|input_features")
# Arguments per token that a call may have if prefixes are to be compared by their ids alone. In a packed call it may
# also have those that say what its layout says.
_COMPARED = ("input_ids", "attention_mask", "labels")
_OF_LAYOUT = ("position_ids", "seq_idx")
# Rates at which a module draws random numbers while it trains.
_DRAWS = re.compile(r"drop|jitter|noise")
_NEFTUNE = "neftune_noise_alpha"
# Labels of question answering: columns of a row. The models' own loss is a softmax over all columns, pads too.
SPANS = ("start_positions", "end_positions")

# Gets the backbone's unpatched forward, the call's arguments, its rows and its outputs.
Watch: TypeAlias = "Callable[[Callable[..., Any], dict[str, Any], PaddedRows, Any], None]"


class Sharing:
    """Policy for one backbone: which of its calls compute common prefixes once. If there is a `refusal`, none does."""

    def __init__(self, backbone: nn.Module, refusal: str | None) -> None:
        self.refusal, self.backbone = refusal, backbone
        self._rates: list[_Rate] = []
        self._modules: list[nn.Module] = []
        self._logged = False

    def rows_of(self, call: Mapping[str, Any], rows: PaddedRows) -> SharedRows | None:
        """Return the rows of a padded call with each common prefix once; `None` if nothing is shared."""
        ids = self._comparable_ids(call, rows.shape, known=_COMPARED)
        return None if ids is None else shared_rows_of(rows, ids)

    def documents_of(self, call: Mapping[str, Any], layout: PackedLayout) -> SharedDocuments | None:
        """Return the documents of a packed call with each common prefix once; `None` if nothing is shared."""
        ids = self._comparable_ids(call, (layout.rows, layout.row_length), known=(*_COMPARED, *_OF_LAYOUT))
        if ids is None or not _count_from_zero(call.get("position_ids"), layout):
            return None
        return shared_documents_of(layout, ids)

    def _comparable_ids(
        self, call: Mapping[str, Any], shape: tuple[int, int], *, known: Sequence[str]
    ) -> torch.Tensor | None:
        """Return the ids of a call `(B, L)` if equal ids mean equal results.

        They may not if positions, kinds or embeddings come with the ids, or if random numbers are drawn.
        """
        ids = call.get("input_ids")
        if self.refusal or not isinstance(ids, torch.Tensor):
            return None
        tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        if any(shape in (value.shape[:2], value.shape[1:]) for name, value in tensors.items() if name not in known):
            return None
        drawing = self._draws()
        if drawing is not None and not self._logged:
            self._logged = True
            logger.warning(
                "trl-packfa: rows of %s share no prefixes while %s is not 0: each row draws its own random numbers. "
                "Set it to 0 to share them.",
                type(self.backbone).__name__,
                drawing,
            )
        return ids if drawing is None else None

    def warn_of_refusal(self, model: nn.Module) -> None:
        """Log why no call of this model shares anything, if none does."""
        if self.refusal:
            logger.warning(
                "trl-packfa: rows of %s share no prefixes: %s. Each row is computed separately.",
                type(inner_model(model)).__name__,
                self.refusal,
            )

    def _draws(self) -> str | None:
        """Return the name of a rate at which the model draws random numbers now: each row would draw its own."""
        modules = list(self.backbone.modules())
        if modules != self._modules:  # an adapter has come, or has replaced another, with dropout of its own
            self._modules, self._rates = modules, _rates_of(modules)
        drawing = (rate for rate in self._rates if rate.module.training and getattr(rate.holder, rate.name, None))
        return next((f"{type(rate.module).__name__}.{rate.name}" for rate in drawing), None)


@dataclass(eq=False)
class Unpadding:
    """Policy for one backbone: which of its padded calls run as one row of their true tokens. It also counts them."""

    module: nn.Module  # the module that runs the row: the backbone, or an encoder's stack of layers
    sharing: Sharing | None
    # Whether the model may be used for decoding: a call without gradients whose config asks for a cache then gets the
    # cache and runs with its pads.
    generates: bool
    runs_by_row: frozenset[str]  # arguments of cross-attention to images, which runs on padded rows
    is_on: bool = True  # whether calls run without pads; off while padded calls are measured
    takes_left: bool = True  # whether rows padded on the left run without their pads; the check finds it
    watch: Watch | None = None  # called for every call that runs without its pads
    # Whether the next backward refuses a loss that reads pads, and the model's name in that error.
    guards: bool = True
    called: str = ""
    noise: EmbeddingNoise = field(default_factory=lambda: EmbeddingNoise(0.0))
    calls: int = 0  # that ran without their pads so far
    tokens: int = 0  # true tokens of all masks so far
    pads: int = 0
    trained: int = 0  # true tokens of calls with gradients
    trained_documents: int = 0  # rows with tokens
    shared: int = 0  # true tokens that were not computed, because another row has the same prefix
    bidirectional: int = 0  # spans whose tokens saw each other both ways, of layers with and without a window
    _logged: frozenset[str] = frozenset()

    def rows_of(self, call: dict[str, Any], read: dict[str, Any]) -> PaddedRows | None:
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
        if self._asks_for_cache(call):
            if self.module.training and torch.is_grad_enabled():
                self.log_once(
                    "trl-packfa: padded calls of %s ask for a cache (use_cache=True), so they run with their pads. "
                    "Set use_cache=False to train without them."
                )
            return None
        rows = rows_of(mask)
        if not self.takes_left and any(rows.starts):
            self.log_once(
                "trl-packfa: rows padded on the left run with their pads in %s: its pooling reads the first column of "
                "a row. Set tokenizer.padding_side='right'."
            )
            return None
        as_rows(call, rows.shape)
        self._count(rows)
        # Equal tokens of two rows may stand for different images.
        has_images = _modalities(read) or any(read.get(name) is not None for name in self.runs_by_row)
        shared = None if self.sharing is None or has_images else self.sharing.rows_of(call, rows)
        if shared is not None:
            self.shared += shared.num_tokens - shared.num_packed
            return shared
        # A batch without pads counts as well, if a re-cut step's rows have other lengths than in the padded run.
        if not rows.num_tokens or not (rows.num_pads or rows.widths):
            return None
        # Checked last: a batch of images without pads runs as it is. Bool marks of an image's tokens are converted.
        others = {name: v for name, v in read.items() if rows.row_axis(v) != 0 or v.dtype != torch.bool}
        refuse_modalities(others, "a batch without its pads")
        _refuse_other_rows(read, rows, self.runs_by_row)
        return rows

    @outside_of_graphs
    def shared_documents_of(self, call: dict[str, Any], layout: PackedLayout) -> SharedDocuments | None:
        """Return the documents of a packed call with each common prefix once, `None` if none is shared."""
        if self.sharing is None or layout.shard is not None:  # the prefix may lie on another process
            return None
        shared = self.sharing.documents_of(call, layout)
        if shared is not None:
            self.shared += shared.num_tokens - shared.num_packed
        return shared

    def _asks_for_cache(self, call: dict[str, Any]) -> bool:
        """Tell whether a call is to return a cache.

        A call that does not say follows its config, which asks for one by default. Training does not read the cache,
        but a call without gradients may be the first of a decoding loop.
        """
        use_cache = call.get("use_cache")
        if use_cache is not None or torch.is_grad_enabled() or not self.generates:
            return use_cache is True
        return getattr(getattr(self.module, "config", None), "use_cache", None) is True

    def log_once(self, text: str, module: nn.Module | None = None) -> None:
        """Log a warning about this module, or another one, if it was not logged before."""
        if text not in self._logged:
            self._logged |= {text}
            logger.warning(text, type(self.module if module is None else module).__name__)

    def _count(self, rows: PaddedRows) -> None:
        self.tokens += rows.num_tokens
        self.pads += rows.num_pads
        if torch.is_grad_enabled():
            self.trained += rows.num_tokens
            self.trained_documents += sum(length > 0 for length in rows.lengths)

    def note(self, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any) -> None:
        """Count a call that ran without its pads, and pass it to `watch` with the backbone's unpatched `forward`.

        The first backward raises [`ContaminationError`] if the loss reads pads.
        """
        self.calls += 1
        if self.watch is not None:
            self.watch(forward, call, rows, outputs)
        if self.guards and torch.is_grad_enabled():
            for value in _by_token(outputs, rows.shape):
                value.register_hook(partial(self._refuse_gradients_at_pads, rows))

    def _refuse_gradients_at_pads(self, rows: PaddedRows, gradient: torch.Tensor) -> None:
        """Raise [`ContaminationError`] if a loss depends on outputs `(B, L, ...)` at pads: they are zeros here."""
        at_pads = gradient.detach().reshape(rows.shape[0] * rows.shape[1], -1).any(-1)
        at_pads[rows.index(at_pads.device)] = False
        if bool(at_pads.any()):
            row, column = divmod(int(at_pads.nonzero()[0]), rows.shape[1])
            raise ContaminationError(
                f"{self.called or type(self.module).__name__}: the loss depends on what the model computes at a pad, "
                f"column {column} of row {row}.",
                why=["without pads nothing is computed there"],
                do="Mask pads in the loss (labels of -100), or train padded: without padding_free, or with "
                "patch(model, unpad=False).",
            )
        self.guards = False

    @outside_of_graphs
    def put_back(self, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any) -> Any:
        """Return the outputs of a call that ran without its pads in the padded batch's shape, after [`note`]."""
        outputs = rows.put_back_outputs(outputs)
        self.note(forward, call, rows, outputs)
        return outputs


def states_of(outputs: Any) -> torch.Tensor:
    """Return what a model or a part of it computes for each token, `(B, L, D)`: logits, or else hidden states.

    The logits of question answering are `(B, L, 2)`. Raise [`UnsupportedModel`] if there is neither.
    """
    if isinstance(outputs, tuple):  # with return_dict=False they come first
        return outputs[0]
    for name in ("logits", "last_hidden_state"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    if getattr(outputs, "start_logits", None) is not None:
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    raise UnsupportedModel(f"{type(outputs).__name__} has neither logits nor hidden states.")


def _by_token(outputs: Any, shape: tuple[int, int]) -> list[torch.Tensor]:
    """Return the outputs `(B, L, ...)` with gradients; of shape `(B, L)` only the logits of question answering."""
    logits = [getattr(outputs, name, None) for name in ("start_logits", "end_logits")]
    others = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor) and value.dim() > 2]
    found = [value for value in (*others, *logits) if value is not None and value.shape[:2] == shape]
    return [value for value in found if value.requires_grad]


class SpanLossOverride(NamedOverride):
    """Forward of a model for question answering, whose calls with labels run with their pads.

    The model's own loss is a softmax over all columns of a row. So it reads the logits at pads, which are not there
    without the pads, and in a packed row it would read other documents.
    """

    def __init__(self, module: nn.Module, unpadding: Unpadding | None, original: Callable[..., Any] | None) -> None:
        super().__init__(module, original)
        self.unpadding = unpadding
        self.__signature__ = forward_signature(module)  # the Trainer reads it

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        if not self._trains_on_spans(self.named(args, kwargs)):
            return self.call_original(*args, **kwargs)
        with set_inside(self.unpadding, is_on=False):
            return self.call_original(*args, **kwargs)

    @outside_of_graphs
    def _trains_on_spans(self, call: dict[str, Any]) -> bool:
        """Tell whether a call brings labels and could run without pads; raise [`PackingError`] for packed rows."""
        if all(call.get(name) is None for name in SPANS):
            return False
        if layout_of(call) is not None:
            raise PackingError(
                f"{' and '.join(SPANS)} cannot come with packed rows.",
                why=[f"the loss of {type(self.module).__name__} is a softmax over a whole row, other documents too"],
                do="Pass the documents as a padded batch.",
            )
        if self.unpadding is None or not self.unpadding.is_on:
            return False
        self.unpadding.log_once(
            "trl-packfa: calls of %s with start_positions run with their pads: its own loss is a softmax over all "
            "columns of a row, pads too. Calls without labels run without them.",
            self.module,
        )
        return True


def _modalities(call: dict[str, Any]) -> list[str]:
    """Return the names of the arguments with images or sounds."""
    return [name for name, value in call.items() if _MODALITIES.search(name) and value is not None]


def _refuse_other_rows(call: dict[str, Any], rows: PaddedRows, runs_by_row: frozenset[str]) -> None:
    """Raise [`PackingError`] for arguments with a part for each row that is not a part for each token.

    An example are the encoder states `(B, E, D)` of cross-attention. Those of cross-attention to images run by row.
    """
    count, length = rows.shape
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    by_row = [name for name, value in tensors.items() if value.shape[0] == count and value.shape[1] != length]
    # Positions of three kinds for three rows, `(3, 3, L)`, are for each token.
    found = [name for name in by_row if name not in runs_by_row and rows.row_axis(tensors[name]) is None]
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


def _count_from_zero(position_ids: torch.Tensor | None, layout: PackedLayout) -> bool:
    """Tell whether positions are those of the layout; on an accelerator a collator's are trusted, as elsewhere."""
    if position_ids is None or position_ids.device.type != "cpu":
        return position_ids is None or layout.prefix_tree is not None
    return torch.equal(position_ids, layout.position_ids().to(position_ids))


class _Rate(NamedTuple):
    """A rate at which a module draws random numbers while it trains: an attribute of the module or of its config."""

    module: nn.Module
    holder: Any
    name: str


def _rates_of(modules: Iterable[nn.Module]) -> list[_Rate]:
    """Return all rates at which modules draw random numbers, 0 or not."""
    rates: list[_Rate] = []
    for module in modules:
        if isinstance(module, nn.Embedding):
            rates.append(_Rate(module, module, _NEFTUNE))  # transformers sets it when training begins
        if (config := own_config(module)) is not None:  # some forwards read a rate there, at each call
            read = getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
            rates += [_Rate(module, config, name) for name in read if _DRAWS.search(name) and hasattr(config, name)]
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if isinstance(value, float) and (_DRAWS.search(name) or (is_dropout and name == "p")):
                rates.append(_Rate(module, module, name))
    return rates
