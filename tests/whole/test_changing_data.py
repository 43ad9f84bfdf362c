"""Data that changes between passes: what training does then."""

import pytest
import tiny
from datasets import Dataset, IterableDataset
from selection import exhaustive
from training import arguments, losses, packed_trainer
from transformers import TrainerCallback

from trl_packfa.errors import InvalidDataset

STRATEGIES = ["step", "bfd", *exhaustive("minibatch")]


class Source:
    """A generator whose pass `i` has `passes[i]` documents of that pass's own word; the last goes on."""

    def __init__(self, *passes):
        self.passes, self.read = passes, 0

    def __call__(self):
        count = self.passes[min(self.read, len(self.passes) - 1)]
        self.read += 1
        for i in range(count):
            yield {"input_ids": [3 + self.read % 90, *(10 + (i + j) % 50 for j in range(5))]}


class Words(TrainerCallback):
    """Which words began the documents of each step."""

    def __init__(self, trainer):
        self.passes, self.collate = [], trainer.data_collator
        trainer.data_collator = self

    def __call__(self, examples):
        self.passes += [example["input_ids"][0] - 3 for example in examples]
        return self.collate(examples)


def train(source, strategy, steps, out):
    source_of_stream = IterableDataset.from_generator(source)
    args = arguments(out=out, packing_strategy=strategy, max_length=24, max_steps=steps, check_packing=False)
    trainer = packed_trainer(args, train_dataset=source_of_stream)
    words = Words(trainer)
    trainer.train()
    return trainer, words.passes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("later", [5, 40])
def test_a_stream_that_grows_or_shrinks_is_read_as_it_is(strategy, later, tmp_path):
    source = Source(16, 16, later)
    trainer, passes = train(source, strategy, 12, tmp_path)
    assert len(losses(trainer)) == 12, "no step is short, none is missing"
    assert source.read >= 3
    if strategy != "bfd":  # whose buffer reads many passes ahead
        assert sorted(passes) == passes, "the new documents, in their order"
        whole = sorted(set(passes))[1:-1]
        assert all(passes.count(i) == later for i in whole if i > 2), "each once in its pass"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stream_that_runs_dry_ends_the_run(strategy, tmp_path):
    """It must not wait for a document for ever."""
    with pytest.raises(InvalidDataset, match="no document to train on"):
        train(Source(*[16] * 8, 0), strategy, 50, tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_dataset_during_training_is_for_the_next_run(strategy, tmp_path):
    """Steps were planned for the dataset that the run began with."""
    longer = Dataset.from_list([{"input_ids": list(range(3, 23)), "labels": list(range(3, 23))}] * 8)

    class Swap(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            trainer.train_dataset = longer

    args = arguments(out=tmp_path, packing_strategy=strategy, max_length=48, max_steps=-1, num_train_epochs=2)
    plain, trainer = packed_trainer(args), packed_trainer(args, model=tiny.model(layers=2))
    trainer.add_callback(Swap())
    plain.train()
    trainer.train()
    assert losses(trainer) == losses(plain)
