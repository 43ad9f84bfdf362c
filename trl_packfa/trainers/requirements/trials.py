"""Trials of a user's data collator and loss function on two small documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...comparison import Comparison
from ...errors import PackingError
from ...layout.from_call import layout_of


def how_collator_fails(collator: Callable[[list[Any]], dict[str, Any]]) -> str:
    """Return the reason why batches of a data collator do not mark where documents begin; `""` if they do."""
    try:
        layout = layout_of(collator([{"input_ids": ids, "labels": list(ids)} for ids in ([1, 2, 3], [4, 5])]))
    except (PackingError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"it failed on two tokenized documents: {error!r}"
    # A third document may be padding.
    marks = layout is not None and layout.lengths[:2] == (3, 2)
    return "" if marks else "it returns neither position_ids that restart nor cu_seq_lens_q"


def how_loss_differs(loss_func: Any, vocabulary: int, device: torch.device) -> str:
    """Return the reason why a loss of two small documents, on random logits, differs if they are packed, else `""`."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 5, vocabulary), generator=generator).to(device)
    labels = torch.tensor([[2, 1, 0, 1, 2], [1, 2, 1, -100, -100]], device=device)
    packed_logits = torch.cat([logits[:1], logits[1:, :3]], dim=1)
    packed_labels = torch.tensor([[-100, 1, 0, 1, 2, -100, 2, 1]], device=device)  # the collator masks first tokens
    # 6 labels are trained. A function that divides by its own count of labels agrees at 6 by chance, but not at 60.
    for count in (torch.tensor(6, device=device), torch.tensor(60, device=device)):
        try:
            padded, packed = (
                float(loss_func(CausalLMOutputWithPast(logits=scores), wanted.clone(), num_items_in_batch=count))
                for scores, wanted in ((logits, labels), (packed_logits, packed_labels))
            )
        except Exception as error:  # a user's function can raise anything; then nothing shows that packing is right
            return f"it failed on logits and labels of two documents: {error!r}"
        losses = f"{padded:.4f} padded, {packed:.4f} packed"
        if not (found := Comparison.of_means("own loss", packed, padded, logits.dtype, of=losses)).holds:
            return found.why
    return ""
