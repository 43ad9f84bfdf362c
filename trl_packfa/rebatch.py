"""Any causal backbone, document by document: the last rung of exactness.

The packed row is taken apart, documents of similar length run together as a right-padded batch, and the outputs are
put back in place. Causal modules never see what comes after a token, so no mask is needed: not for attention, not for
recurrent state, short convolutions or position biases. It costs the padding inside a group and nothing else is packed.

Shape letters: B rows, L row length, T packed tokens (B * L), D model dim, G documents of a group, M their longest
length, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .errors import InvalidLayout, PackingError
from .grouping import group_by_length
from .layout import PackedLayout

# What says where documents are, which the separate documents need no more.
BOUNDARIES = (
    "attention_mask",
    "position_ids",
    "packed_layout",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)


def run_by_document(forward: Callable[..., Any], call: dict[str, Any], layout: PackedLayout) -> Any:
    """Run `forward` on the documents of a packed call; returns its output type with packed hidden states.

    Args:
        forward (`Callable`):
            The backbone's forward.
        call (`dict[str, Any]`):
            Its arguments, with `input_ids` `(B, L)` or `inputs_embeds` `(B, L, D)`.
        layout ([`PackedLayout`]):
            Where the documents are.

    Raises:
        [`InvalidLayout`]: if `position_ids` are not those of documents that each start at 0.
        [`PackingError`]: if hidden states of every layer or attention weights are asked for.
    """
    _require_plain(call, layout)
    name = "input_ids" if call.get("inputs_embeds") is None else "inputs_embeds"
    others = {key: value for key, value in call.items() if key not in (*BOUNDARIES, "input_ids", "inputs_embeds")}
    documents = layout.split(call[name])
    hidden: list[torch.Tensor] = [documents[0]] * layout.num_documents
    routers: list[Sequence[torch.Tensor]] = [()] * layout.num_documents
    output: Any = None
    for group in group_by_length(layout.lengths):
        rows = pad_sequence([documents[i] for i in group], batch_first=True)
        output = forward(**{name: rows}, **others)
        router_logits = [logits.view(*rows.shape[:2], -1) for logits in getattr(output, "router_logits", None) or ()]
        for slot, i in enumerate(group):
            hidden[i] = output.last_hidden_state[slot, : layout.lengths[i]]
            routers[i] = [logits[slot, : layout.lengths[i]] for logits in router_logits]
    packed = {"last_hidden_state": torch.cat(hidden).view(layout.rows, layout.row_length, -1)}
    if any(routers):
        packed["router_logits"] = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))  # type: ignore[assignment]
    return type(output)(**packed)


def _require_plain(call: dict[str, Any], layout: PackedLayout) -> None:
    if call.get("output_hidden_states"):
        raise PackingError(
            "hidden states of every layer cannot be returned where the backbone runs document by document.",
            do="Pass output_hidden_states=False, or the documents as a padded batch.",
        )
    positions = call.get("position_ids")
    if positions is not None and not torch.equal(positions.expand(layout.rows, -1), layout.position_ids()):
        raise InvalidLayout(
            "position_ids do not count each document from 0, which running it by itself would.",
            do="Let positions restart at 0 at each boundary.",
        )
