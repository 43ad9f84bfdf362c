"""Padded batches: rows of documents with pads on one side, or on both."""

import torch

from trl_packfa.layout.padded_rows import PaddedRows

SIDES = ("right", "left", "both")


def padded(documents, side="right", *, extra=3, pad=0):
    """Return `input_ids` and `attention_mask`, both `(B, L)`."""
    width = max(map(len, documents)) + extra
    ids = torch.full((len(documents), width), pad)
    mask = torch.zeros_like(ids)
    for i, document in enumerate(documents):
        free = width - len(document)
        start = {"right": 0, "left": free, "both": free // 2}[side]
        ids[i, start : start + len(document)] = document
        mask[i, start : start + len(document)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def masks_read(monkeypatch):
    """Return a list with an item for each mask that is read from now on."""
    read, own = [], PaddedRows.from_mask.__func__
    monkeypatch.setattr(PaddedRows, "from_mask", classmethod(lambda cls, mask: read.append(1) or own(cls, mask)))
    return read


def rows(tensor, mask):
    """Return the true tokens of each row of `(B, L, ...)`."""
    return [row[real.bool()] for row, real in zip(tensor, mask, strict=True)]
