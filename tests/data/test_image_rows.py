"""Bad rows of images: the error names the row and its column."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import vision
from datasets import Dataset, Features, Image, List, Value
from image_runs import build
from trl_trainers import train

from trl_packfa.data import image_examples
from trl_packfa.data.image_examples import OneByOne, Processed
from trl_packfa.data.image_rows import NamingCollator, NumberedRows, look_at_images
from trl_packfa.data.step_cutting import count_true_tokens
from trl_packfa.data.steps import micro_batches_of
from trl_packfa.errors import InvalidDataset
from trl_packfa.trainers.sft.images import ImageCutter

every_strategy = pytest.mark.parametrize("strategy", ["step", "minibatch"])


def rows(count=12):
    return list(vision.uneven(count))


def encoded(made):
    """Return the rows as a dataset whose images are files in memory; bytes stay as they are."""
    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"images": List(Image()), "messages": List(message)})
    return Dataset.from_list(made, features=features)


@every_strategy
def test_an_image_that_cannot_be_read_is_named(strategy, tmp_path):
    made = rows()
    made[7]["images"] = [b"no image"]
    trainer = build(tmp_path, data=encoded(made), packing_strategy=strategy)
    with pytest.raises(InvalidDataset, match=r"row 7 of the training dataset cannot be read: its column 'images'"):
        train(trainer)


@every_strategy
@pytest.mark.parametrize("stream", [False, True])
def test_an_image_that_the_processor_rejects_is_named(stream, strategy, tmp_path):
    made = rows()
    made[7]["images"] = [made[7]["images"][0].resize((2000, 1))]  # wider than 200 times its height
    data = Dataset.from_list(made)
    data = data.to_iterable_dataset() if stream else data
    trainer = build(tmp_path, built=vision.family("qwen3_vl"), data=data, packing_strategy=strategy)
    where = "an example .it begins with '" if stream else "row 7 of the training dataset"
    with pytest.raises(InvalidDataset, match=rf"{where}(?s:.*)cannot be processed(?s:.*)aspect ratio"):
        train(trainer)


def test_an_image_that_is_missing_is_refused_before_training(tmp_path):
    made = rows()
    for images in (None, [made[1]["images"][0], None]):
        data = encoded([{**row, "images": images if i == 5 else row["images"]} for i, row in enumerate(made)])
        with pytest.raises(InvalidDataset, match="row 5 of the train dataset has no image: its column 'images' is or"):
            build(tmp_path, data=data)
    one = [{**row, "image": None if i == 2 else row["image"]} for i, row in enumerate(vision.prompts(6))]
    with pytest.raises(InvalidDataset, match="row 2 of the train dataset has no image: its column 'image' is or"):
        look_at_images(Dataset.from_list(one), name="train")
    # A stream's rows are found as they come.
    collate = NamingCollator(len)
    with pytest.raises(InvalidDataset, match=r"an example .it begins with '4 5'. has no image"):
        collate([{"image": None, "messages": [{"role": "user", "content": "4 5"}]}])
    assert collate([{"images": [], "text": "4 5"}]) == 1


def test_rows_without_images_are_counted_and_refused_where_weights_are_in_parts(caplog):
    data = vision.uneven(12, without=(3, 10))
    look_at_images(data, name="train")
    assert "2 of 12 rows of the train dataset have no image (row 3 is the first)" in caplog.text
    caplog.clear()
    look_at_images(vision.uneven(12), name="train", requires_images=True)
    look_at_images(vision.uneven(4, without=range(4)), name="train")  # text alone
    look_at_images(data.to_iterable_dataset(), name="train", requires_images=True)
    assert not caplog.text
    with pytest.raises(InvalidDataset, match=r"row 3 of the train dataset has no image(?s:.*)weights are sharded"):
        look_at_images(data, name="train", requires_images=True)
    with pytest.raises(InvalidDataset, match=r"has no image(?s:.*)weights are sharded"):
        NamingCollator(len, requires_images=True)([data[3]])


@pytest.mark.parametrize("kind", ["messages", "prompts"])
def test_a_cut_through_an_image_is_named(kind, tmp_path):
    """TRL cuts tokens, but no pixels."""
    data = vision.uneven(12) if kind == "messages" else vision.prompts(12)
    trainer = build(tmp_path, data=data, max_length=4)
    with pytest.raises(InvalidDataset, match=r"row \d+ of the training dataset cannot be processed(?s:.*)max_length"):
        train(trainer)
    # A cut behind the images is TRL's.
    train(build(tmp_path, data=data, max_length=16))


def test_an_error_of_every_row_stays_as_it_is():
    def fails(examples):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        NamingCollator(fails)([{"text": "1"}, {"text": "2"}])


def test_numbered_rows_read_what_the_dataset_holds():
    data = vision.uneven(6)
    numbered = NumberedRows(data, "training")
    assert len(numbered) == 6 and numbered[4]["messages"] == data[4]["messages"]
    assert [row["trl_packfa_row"] for row in numbered.__getitems__([1, 3])] == [
        "row 1 of the training dataset", "row 3 of the training dataset"
    ]  # fmt: skip


def test_a_rank_with_fewer_examples_runs_untrained_ones(tmp_path, monkeypatch):
    """The other rank has three examples that fill a micro-batch each; this one has two."""
    trainer = build(tmp_path, max_tokens_per_microbatch=40)
    cutter, collate = trainer._cutter, trainer.data_collator
    load = OneByOne(collate.collator, cutter.weights)
    other = image_examples.RankStep(40, [np.array([40, 40, 40])], 120.0, np.array([3, 120, 60, 12]))
    cutter.accelerator = SimpleNamespace(num_processes=2)
    monkeypatch.setattr(image_examples, "gather_object", lambda mine: [*mine, other])
    batch = load([copy.copy(row) for row in vision.uneven(2)])
    assert all(isinstance(one, Processed) for one in batch)
    (whole,) = ImageCutter.batches(cutter, [batch], collate)
    idle, *trained = micro_batches_of(whole)
    assert whole.step.count == 3 and len(trained) == 2 and (idle["labels"] == -100).all()
    assert count_true_tokens(whole) == sum(one.tokens for one in batch) and whole.step.imbalance > 1
    assert cutter.reports["train"].documents == 5, "examples of both ranks"
    assert sum(int((one["labels"] != -100).sum()) for one in trained) > 0
