"""Data collator that packs documents into one row, under TRL's key names.

Shape letters: T packed tokens (of the batch's single row), S documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from ..errors import InvalidDataset, InvalidLayout
from ..layout import PackedLayout
from ..layout.shared_rows import tree_of

# Our columns and batch keys begin with the package's name, so that they never clash with a user's names.
_PREFIX = "trl_packfa_"
# A stream's column that counts dropped documents and tokens (`dataset.py`). The collator sums it, and
# the trainer removes it from the batch.
LOSSES = f"{_PREFIX}losses"
# Batch key with the number of documents whose first token has a label, which the trainer removes from the batch.
FIRST_LABELS = f"{_PREFIX}first_labels"
# Batch key with each document's source, which the trainer removes from the batch.
SOURCES = f"{_PREFIX}sources"
# Column of rows whose documents share prefixes: the number of tokens that are not computed because of that.
SAVED = f"{_PREFIX}saved"
# TRL's column with the lengths of the documents in a row that is already packed.
ROW_LENGTHS = "seq_lengths"


@dataclass
class DataCollatorForPacking:
    """A data collator that joins documents into one row and adds the document boundaries to the batch.

    ```python
    >>> collator = DataCollatorForPacking(pad_token_id=0)
    >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [-100, 5]}])
    >>> batch["input_ids"], batch["labels"], batch["position_ids"]
    (tensor([[1, 2, 3, 4, 5]]), tensor([[-100,    2,    3, -100,    5]]), tensor([[0, 1, 2, 0, 1]]))
    >>> batch["packed_layout"].lengths
    (3, 2)
    ```

    A patched model reads the boundaries from `packed_layout`. By default the batch also holds `cu_seq_lens_q`,
    `cu_seq_lens_k`, `max_length_q`, `max_length_k` and `seq_idx`, exactly as TRL's padding-free collator sends them.
    The first label of each document is -100, because no token of the document precedes it. An example with
    `seq_lengths` is a row that is already packed.

    Args:
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token id of padding.
        pad_to_multiple_of (`int`, *optional*):
            Pad the row to a multiple of this; padding is one trailing document whose labels are -100.
        source_column (`str`, *optional*):
            Column with the source of each example. The batch's `trl_packfa_sources` names each document's source, so
            that the trainer can log the loss of each source.
        vocab_size (`int`, *optional*):
            Number of token ids that the model accepts. The collator refuses token ids outside of it.
        return_flash_attn_kwargs (`bool`, *optional*, defaults to `True`):
            Send TRL's five keys beside `packed_layout`. Our trainers switch it off: a patched model does not read
            these keys, and each one costs a copy to the device.
        share_prefixes (`bool`, *optional*, defaults to `False`):
            Compare the documents, so that a model on an accelerator, patched with `share_prefixes=True`, need not do
            it.
        count_first_labels (`bool`, *optional*, defaults to `False`):
            Count the documents whose first token has a label in the batch's `trl_packfa_first_labels`. The Trainer
            divides the loss of some classes, such as `GPT2LMHeadModel`, by these labels too, though nothing predicts
            them.
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int | None = None
    source_column: str | None = None
    vocab_size: int | None = None
    return_flash_attn_kwargs: bool = True
    share_prefixes: bool = False
    count_first_labels: bool = False

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `examples` into one row.

        Args:
            examples (`Sequence[Mapping[str, Any]]`):
                With `input_ids` and, optionally, `labels` (token ids) and `seq_lengths` (tokens).

        Returns:
            `dict[str, Any]`: `input_ids`, `labels` and `position_ids`, int64, shape `(1, T)`; `packed_layout`; the
            keys that the options add.

        Raises:
            [`InvalidLayout`]: if an example's columns differ in length.
            [`InvalidDataset`]: if it holds tokens outside of `vocab_size`.
        """
        # Bad documents are found here, on the host: on CUDA a wrong index makes the device unusable for the process.
        for example in examples:
            _require_even(example)
        input_ids = list(chain.from_iterable(example["input_ids"] for example in examples))
        labels = list(chain.from_iterable(example.get("labels", example["input_ids"]) for example in examples))
        parts = [list(example.get(ROW_LENGTHS) or [len(example["input_ids"])]) for example in examples]
        lengths = list(chain.from_iterable(parts))
        # 5 tokens need -5 % 4 = 3 tokens of padding to reach a multiple of 4.
        padding = -len(input_ids) % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        if padding:
            input_ids += [self.pad_token_id] * padding
            labels += [-100] * padding
            # Padding is a separate document, so that no token of a real document attends to it.
            lengths.append(padding)
        layout = PackedLayout.from_lengths(lengths, padding=padding)
        labels_T = torch.tensor(labels)
        # TRL shifts labels by one along the row. Without -100 here, the last token of a document would be trained to
        # predict the first token of the next document.
        labels_T[layout.cu_seqlens[:-1].long()] = -100
        input_ids_T = torch.tensor(input_ids)
        if self.share_prefixes:
            layout = replace(layout, prefix_tree=tree_of(layout, input_ids_T))
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
        if self.count_first_labels:  # a row that is already packed has none, as in TRL's collator
            whole = [
                example.get("labels", example["input_ids"]) for example in examples if not example.get(ROW_LENGTHS)
            ]
            batch[FIRST_LABELS] = sum(labels[0] != -100 for labels in whole if len(labels))
        # DataLoader, accelerate and pinning leave a tuple of strings as it is. The trainer removes it before the
        # forward.
        if self.source_column is not None and all(self.source_column in example for example in examples):
            sources = [str(example[self.source_column]) for example in examples]
            # A row that is already packed has one source: rows of 2 and 1 documents from a and b give (a, a, b).
            batch[SOURCES] = tuple(source for source, row in zip(sources, parts, strict=True) for _ in row)
        if any(LOSSES in example for example in examples):
            # Documents truncated, split, dropped, and tokens lost: [(1, 0, 0, 5), (0, 0, 1, 9)] sum to (1, 0, 1, 14).
            # Of an example that was cut into parts the first has the counts.
            counts = (example[LOSSES] for example in examples if LOSSES in example)
            batch[LOSSES] = tuple(map(sum, zip(*counts, strict=True)))
        return batch


def _require_even(example: Mapping[str, Any]) -> None:
    """Refuse an example whose columns differ in length: over a batch, the differences may cancel out."""
    tokens, labels, parts = len(example["input_ids"]), example.get("labels"), example.get(ROW_LENGTHS)
    if labels is not None and len(labels) != tokens:
        raise InvalidLayout(
            f"an example has {tokens} input_ids and {len(labels)} labels.", do="Send one label for each token."
        )
    if parts and sum(parts) != tokens:
        raise InvalidLayout(
            f"an example has {tokens} input_ids, but its seq_lengths {list(parts)} sum up to {sum(parts)}.",
            do="Send the length of each document in the row, in order.",
        )


def _require_known(tokens_T: torch.Tensor, vocab_size: int) -> None:
    """Refuse token ids outside of the vocabulary. On CUDA they make the device unusable for the process."""
    unknown = tokens_T[(tokens_T < 0) | (tokens_T >= vocab_size)]
    if len(unknown):
        raise InvalidDataset(
            f"a document of the batch holds token {int(unknown[0])}, but the model has tokens 0 to {vocab_size - 1}.",
            do="Use the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)).",
        )


# TRL's metrics of what a stream has lost, in the order of its column.
_LOST = ("truncated", "split", "dropped", "tokens_lost")


def count_batch(metrics: Mapping[str, list[float]], inputs: dict[str, Any], *, capacity: int | None) -> None:
    """Add a packed batch's counts to TRL's metrics, and remove from `inputs` what is no model input."""
    lost = inputs.pop(LOSSES, None)
    inputs.pop(FIRST_LABELS, None)
    layout = inputs.get("packed_layout")
    if layout is not None:
        lengths = layout.true_lengths
        metrics["documents"].append(len(lengths))
        metrics["longest_document"].append(max(lengths, default=0))
        if capacity:
            computed = sum(lengths) if layout.prefix_tree is None else layout.prefix_tree.num_tokens - layout.padding
            metrics["fill"].append(computed / capacity)
    if lost is not None:
        for name, count in zip(_LOST, lost, strict=True):
            metrics[name].append(count)


def take_losses(metrics: dict[str, list[float]]) -> dict[str, float]:
    """Take the counts of lost documents and tokens out of TRL's metrics, which it logs as means; return their sums."""
    return {name: sum(metrics.pop(name, ())) for name in _LOST}
