"""Lengths of a dataset, mapped; documents of a stream, cut some at a time."""

import logging

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset

from trl_packfa.data import dataset as data
from trl_packfa.data.collator import LOSSES, SAVED
from trl_packfa.data.dataset import cut_stream, read_lengths


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


def test_lengths_of_a_saved_dataset_map_one_file_that_processes_share(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_COUNTED", 7)  # several parts, which become one
    counts = np.random.default_rng(0).integers(1, 9, 50).tolist()
    Dataset.from_dict({"input_ids": [[1] * count for count in counts]}).save_to_disk(tmp_path)
    for dataset in (Dataset.load_from_disk(tmp_path), Dataset.load_from_disk(tmp_path).shuffle(seed=0)):
        before = pa.total_allocated_bytes()
        lengths = read_lengths(dataset)
        assert pa.total_allocated_bytes() == before and not lengths.flags.owndata, "no copy in memory"
        assert lengths.tolist() == [len(ids) for ids in dataset["input_ids"]]
        assert lengths.dtype == np.int32 and not lengths.flags.writeable


def test_lengths_count_what_is_computed_and_nothing_of_an_empty_dataset():
    columns = {"input_ids": [[1, 2, 3, 1, 2, 4], [5]], SAVED: [2, 0]}
    assert read_lengths(Dataset.from_dict(columns)).tolist() == [4, 1]
    assert read_lengths(Dataset.from_dict(columns).select([])).shape == (0,)
