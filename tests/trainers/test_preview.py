"""Looking at a batch."""

import pytest
import torch
from datasets import Dataset
from training import arguments, packed_trainer
from transformers import DataCollatorWithFlattening

from trl_packfa.errors import InvalidConfig

ROWS = [
    {"prompt": "1 2 3 ", "completion": "4 5"},
    {"prompt": "user 6 ", "completion": "7"},
    {"prompt": "8 ", "completion": "9 10 11"},
]
SEEN = [
    "10 tokens, 2 documents; [[trained]]",
    "document 0, 6 tokens, 3 trained:  1 2 3 [[4 5 </s>]]",
    "document 1, 4 tokens, 2 trained:  user 6 [[7 </s>]]",
]


def trainer(out, *, stream=False, collator=None, **options):
    data = Dataset.from_list(ROWS)
    args = arguments(out=out, per_device_train_batch_size=2, max_length=64, **options)
    data = data.to_iterable_dataset() if stream else data
    return packed_trainer(args, train_dataset=data, data_collator=collator)


CASES = {
    "step": {}, "bfd": {"packing_strategy": "bfd"}, "stream": {"stream": True}, "padding": {"pad_to_multiple_of": 8},
    "another collator": {"collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_shown_with_boundaries_and_labels(case, tmp_path):
    """And no random number is drawn: a run after it is the run without."""
    run = trainer(tmp_path, **CASES[case])
    before = torch.get_rng_state()
    first, *documents = run.preview_batch().splitlines()
    padded = "16 tokens, 3 documents, the last of them 6 tokens of padding; [[trained]]"
    assert first == (padded if case == "padding" else SEEN[0]) and documents[:2] == SEEN[1:]
    assert torch.equal(torch.get_rng_state(), before)


def test_without_packing_there_is_none(tmp_path):
    with pytest.raises(InvalidConfig, match="packing=False: there is no packed batch"):
        trainer(tmp_path, packing=False).preview_batch()
