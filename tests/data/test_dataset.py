"""Documents of a stream, cut some at a time."""

import logging

from datasets import IterableDataset

from trl_packfa.data.collator import LOSSES
from trl_packfa.data.dataset import cut_stream


def of(labels):
    def rows():
        for label in labels:
            yield {"input_ids": [1, 2, 3], "labels": [-100, label, label]}

    return IterableDataset.from_generator(rows)


def test_documents_that_train_nothing_are_told_even_if_none_of_their_call_is_kept(caplog):
    """What was dropped travels with a document that is kept: of these hundred none is."""
    with caplog.at_level(logging.WARNING):
        kept = list(cut_stream(of([-100] * 100 + [5, -100, 6]), max_length=8, overflow="truncate"))
    assert [document["labels"] for document in kept] == [[-100, 5, 5], [-100, 6, 6]]
    assert "100 documents of the stream" in caplog.text
    assert [sum(column) for column in zip(*(document[LOSSES] for document in kept), strict=True)][2] == 1
