"""Documents to one packed batch, under TRL's key names.

Shape letters: T packed tokens (of the batch's single row), S documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from .errors import InvalidDataset, InvalidLayout
from .layout import PackedLayout

# Names of ours among a user's columns and batch keys begin with the package's, so that none is a user's.
_PREFIX = "trl_packfa_"
# A column that streams carry their losses in, see `training/dataset.py`; summed here, popped by the trainer.
LOSSES = f"{_PREFIX}losses"
# A batch's key that names each document's source, popped by the trainer.
SOURCES = f"{_PREFIX}sources"
# TRL's column of the lengths of the documents in a row that was packed before.
ROW_LENGTHS = "seq_lengths"


@dataclass
class DataCollatorForPacking:
    """Concatenates documents into one row and says where each begins, so that nothing has to be derived later.

    ```python
    >>> collator = DataCollatorForPacking(pad_token_id=0)
    >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [-100, 5]}])
    >>> batch["input_ids"], batch["labels"], batch["position_ids"]
    (tensor([[1, 2, 3, 4, 5]]), tensor([[-100,    2,    3, -100,    5]]), tensor([[0, 1, 2, 0, 1]]))
    >>> batch["packed_layout"].lengths
    (3, 2)
    ```

    The batch also holds `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` and `seq_idx`, exactly as
    TRL's padding-free collator sends them, unless told otherwise: a patched model reads `packed_layout`. The first
    label of each document is -100: no token precedes it. An example with `seq_lengths` is a row that was packed
    before.

    Args:
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token of the padding.
        pad_to_multiple_of (`int`, *optional*):
            Pad the row to a multiple of this; padding is one trailing document whose labels are -100.
        source_column (`str`, *optional*):
            Column that says where an example comes from; the batch's `trl_packfa_sources` name each document's, for
            the losses of each source that the trainer logs.
        vocab_size (`int`, *optional*):
            How many tokens the model reads: others are refused instead of looked up.
        return_flash_attn_kwargs (`bool`, *optional*, defaults to `True`):
            Send TRL's five keys beside `packed_layout`. The trainer does not: its model is patched, and each would be
            a copy to the device that nobody reads.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int | None = None
    source_column: str | None = None
    vocab_size: int | None = None
    return_flash_attn_kwargs: bool = True

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `examples` into one row.

        Args:
            examples (`Sequence[Mapping[str, Any]]`):
                With `input_ids` and, optionally, `labels` (token ids) and `seq_lengths` (tokens).

        Returns:
            `dict[str, Any]`: `input_ids`, `labels` and `position_ids`, int64, shape `(1, T)`; `packed_layout`; what
            the options add.

        Raises:
            [`InvalidLayout`]: if an example's columns differ in length.
            [`InvalidDataset`]: if it holds tokens outside of `vocab_size`.
        """
        # What is wrong with a document is found here, on the host: on CUDA a wrong index ends the process's device.
        for example in examples:
            _require_even(example)
        input_ids = list(chain.from_iterable(example["input_ids"] for example in examples))
        labels = list(chain.from_iterable(example.get("labels", example["input_ids"]) for example in examples))
        parts = [list(example.get(ROW_LENGTHS) or [len(example["input_ids"])]) for example in examples]
        lengths = list(chain.from_iterable(parts))
        # 5 tokens to a multiple of 4: -5 % 4 = 3.
        padding = -len(input_ids) % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        if padding:
            input_ids += [self.pad_token_id] * padding
            labels += [-100] * padding
            # A document of its own: true documents stay as they are, and no token of theirs attends to padding.
            lengths.append(padding)
        layout = PackedLayout.from_lengths(lengths, padding=padding)
        labels_T = torch.tensor(labels)
        # TRL shifts labels by one along the row: the last token of one document would be trained to predict the first
        # of the next.
        labels_T[layout.cu_seqlens[:-1].long()] = -100
        input_ids_T = torch.tensor(input_ids)
        if self.vocab_size is not None:
            _require_known(input_ids_T, self.vocab_size)
            _require_known(labels_T[labels_T != -100], self.vocab_size)
        batch: dict[str, Any] = {
            "input_ids": input_ids_T[None],
            "labels": labels_T[None],
            "position_ids": layout.position_ids(),
            **(layout.flash_kwargs() if self.return_flash_attn_kwargs else {}),
            "packed_layout": layout,
        }
        # A tuple of strings passes DataLoader, accelerate and pinning untouched; the trainer pops it before the
        # forward.
        if self.source_column is not None and all(self.source_column in example for example in examples):
            sources = [str(example[self.source_column]) for example in examples]
            # A row that was packed before is of one source: rows of 2 and 1 documents from a and b are (a, a, b).
            batch[SOURCES] = tuple(source for source, row in zip(sources, parts, strict=True) for _ in row)
        if any(LOSSES in example for example in examples):
            # [(1, 0, 0, 5), (0, 0, 1, 9)] is (1, 0, 1, 14): documents truncated, split, dropped, tokens lost.
            batch[LOSSES] = tuple(map(sum, zip(*(example[LOSSES] for example in examples), strict=True)))
        return batch


def _require_even(example: Mapping[str, Any]) -> None:
    """Refuse an example whose columns differ in length. Over a batch such differences may cancel out, and labels and
    boundaries would be shifted without an error."""
    tokens, labels, parts = len(example["input_ids"]), example.get("labels"), example.get(ROW_LENGTHS)
    if labels is not None and len(labels) != tokens:
        raise InvalidLayout(f"an example has {tokens} input_ids and {len(labels)} labels.", do="Send one for each.")
    if parts and sum(parts) != tokens:
        raise InvalidLayout(
            f"an example has {tokens} input_ids, its seq_lengths {list(parts)} sum up to {sum(parts)}.",
            do="Send the length of each document in the row, in order.",
        )


def _require_known(tokens_T: torch.Tensor, vocab_size: int) -> None:
    """Refuse token ids outside of the vocabulary: an index error on a CPU; on CUDA they end the process's device."""
    unknown = tokens_T[(tokens_T < 0) | (tokens_T >= vocab_size)]
    if len(unknown):
        raise InvalidDataset(
            f"a document of the batch holds the token {int(unknown[0])}, the model has 0 to {vocab_size - 1}.",
            do="Use the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)).",
        )
