import pytest
import torch

from trl_packfa import DataCollatorForPacking
from trl_packfa.data.collator import FIRST_LABELS, LOSSES
from trl_packfa.errors import InvalidLayout


def test_matches_trls_padding_free_collator():
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    examples = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]
    ours = DataCollatorForPacking(pad_token_id=0)(examples)
    theirs = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(examples)
    assert set(ours) - set(theirs) == {"packed_layout"}
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name


def test_first_label_of_every_document_is_masked():
    batch = DataCollatorForPacking()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5]]


def test_labels_of_first_tokens_are_counted_if_asked():
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3], "labels": [-100]}, {"input_ids": [4], "labels": [4]}]
    packed = {"input_ids": [5, 6], "seq_lengths": [1, 1]}
    batch = DataCollatorForPacking(count_first_labels=True)([*rows, packed])
    assert batch[FIRST_LABELS] == 2 and FIRST_LABELS not in DataCollatorForPacking()(rows)


def test_padding_is_one_trailing_document():
    collator = DataCollatorForPacking(pad_token_id=9, pad_to_multiple_of=8)
    batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100, -100, -100, -100]]
    assert batch["packed_layout"].lengths == (3, 1, 4)


def test_rows_packed_before_keep_their_boundaries():
    batch = DataCollatorForPacking()([{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}, {"input_ids": [4, 5]}])
    assert batch["packed_layout"].lengths == (2, 1, 2)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1]]


def test_losses_of_a_stream_are_summed():
    rows = [{"input_ids": [1, 2], LOSSES: [1, 0, 2, 30]}, {"input_ids": [3], LOSSES: [0, 0, 0, 4]}]
    assert DataCollatorForPacking()(rows)[LOSSES] == (1, 0, 2, 34)


@pytest.mark.parametrize(("examples", "message"), [
    ([{"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1], "labels": [1, 2]}], "2 input_ids and 1 labels"),
    ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}], r"3 input_ids, but its seq_lengths \[2, 2\] sum up to 4"),
    ([{"input_ids": [1, 2]}, {"input_ids": []}], "lengths must all be positive"),
])  # fmt: skip
def test_examples_that_do_not_add_up_are_refused(examples, message):
    with pytest.raises(InvalidLayout, match=message):
        DataCollatorForPacking()(examples)


def test_losses_of_a_stream_are_summed_also_beside_a_later_part_of_a_cut_example():
    part = {"input_ids": [1, 2], "labels": [1, 2]}
    batch = DataCollatorForPacking()([part, {**part, LOSSES: [1, 0, 0, 5]}])
    assert batch[LOSSES] == (1, 0, 0, 5)
