"""What an example counts in the loss, and what each source's loss is: against losses computed by hand."""

import pytest
import tiny
import torch
from datasets import IterableDataset
from tolerance import assert_another_run, assert_float32, assert_trajectory
from training import arguments, batches_of, dataset, losses, packed_trainer

from trl_packfa import DataCollatorForPacking
from trl_packfa.data.collator import SOURCES
from trl_packfa.trainers.sft.loss_terms import count_examples, example_weights

OPTIONS = {
    "use_peft": False, "optim": "sgd", "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0,
    "train_sampling_strategy": "sequential", "completion_only_loss": True,
}  # fmt: skip


def own_loss(model, example):
    ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"])
    return torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], labels[1:], ignore_index=-100)


@pytest.mark.parametrize("counts", [True, False], ids=["by step", "by micro-batch"])
@pytest.mark.parametrize("strategy", ["step", "minibatch"])
def test_every_example_counts_the_same(tmp_path, strategy, counts):
    """Losses of SGD steps over single examples with gradient accumulation, unpacked and by hand."""
    args = arguments(out=tmp_path, packing_strategy=strategy, loss_weighting="example", gradient_accumulation_steps=2,
                     max_steps=4, **OPTIONS)  # fmt: skip
    trained = tiny.model(layers=2)
    trained.accepts_loss_kwargs = counts  # without, as in Gemma 4, TRL takes the mean of each micro-batch
    trainer = packed_trainer(args, model=trained, peft_config=None)
    model, examples = tiny.model(layers=2), list(trainer.train_dataset)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(4):
        optimizer.zero_grad()
        batch = examples[8 * step : 8 * (step + 1)]
        loss = sum(own_loss(model, example) / len(batch) for example in batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    trainer.train()
    assert_trajectory(losses(trainer), expected)
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert_float32(ours, theirs)


def test_negative_control_tokens_weigh_otherwise(tmp_path):
    runs = []
    for weighting in ("token", "example"):
        args = arguments(out=tmp_path, loss_weighting=weighting, max_steps=2, **OPTIONS)
        runs.append(packed_trainer(args, model=tiny.model(layers=2), peft_config=None))
        runs[-1].train()
    assert_another_run(losses(runs[0])[:1], losses(runs[1])[:1])


def test_weights_of_packed_and_padded_examples():
    examples = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5]}, {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}]
    batch = DataCollatorForPacking(pad_to_multiple_of=8)(examples)
    assert count_examples(batch) == 2
    weights = example_weights(batch)
    trained = batch["labels"][:, 1:] != -100
    assert torch.equal(weights[trained], torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))
    padded = {"labels": torch.tensor([[5, 6, -100], [-100, 6, 7]])}
    assert torch.equal(example_weights(padded)[padded["labels"][:, 1:] != -100], torch.tensor([1.0, 0.5, 0.5]))
    assert count_examples(padded) == 2


@pytest.mark.parametrize("strategy", ["step", "minibatch", "bfd"])
def test_each_sources_loss_is_logged(tmp_path, strategy):
    args = arguments(out=tmp_path, packing_strategy=strategy, max_length=96, loss_by="source", max_steps=1, **OPTIONS)
    trainer = packed_trainer(args, model=tiny.model(layers=2), peft_config=None)
    model = tiny.model(layers=2)  # a copy of the trainer's would share TRL's forward with it
    batches, sums = batches_of(trainer), {}
    trainer.train()
    for batch in batches:
        split = batch["packed_layout"].split
        for source, ids, labels in zip(batch[SOURCES], split(batch["input_ids"]), split(batch["labels"]), strict=True):
            logits = model(input_ids=ids[None]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            total = sums.setdefault(source, [0.0, 0])
            total[0], total[1] = total[0] + float(loss), total[1] + int((labels[1:] != -100).sum())
    logged = trainer.state.log_history[0]
    names = sorted(sums)
    assert len(names) > 1
    assert_trajectory([[logged[f"loss/{n}"] for n in names]], [[sums[n][0] / sums[n][1] for n in names]])


@pytest.mark.parametrize("strategy", ["step", "bfd"])
def test_sources_of_a_stream_are_logged(tmp_path, strategy):
    stream = IterableDataset.from_generator(lambda: iter(dataset()))
    args = arguments(out=tmp_path, loss_by="source", packing_strategy=strategy, max_length=96, max_steps=2)
    trainer = packed_trainer(args, train_dataset=stream)
    trainer.train()
    assert {"loss/0", "loss/1", "loss/2"} <= set(trainer.state.log_history[0])
