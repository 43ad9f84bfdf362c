"""Streams: every document once in a pass, whatever the ranks, shards and workers; resumed where they stopped."""

import json
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import exhaustive
from torch.utils.data import DataLoader
from training import arguments, dataset, losses, packed_trainer, trained
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.data.batching import Batching
from trl_packfa.data.streaming import STREAM_WINDOW, PackedStream, resumes_by_state
from trl_packfa.errors import InvalidDataset
from trl_packfa.packing import BFD, MINIBATCH, WRAPPED, pack_buffer

COUNT = 120
ROWS = {"strategy": BFD, "max_length": 40}
WAYS = {"documents": {}, "bfd": {**ROWS, "window": 30}, "wrapped": {**ROWS, "strategy": WRAPPED}}


class EpochEnds(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_epoch_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def documents(count=COUNT):
    """Documents of 1 to 40 tokens; the first token says which it is."""
    sizes = np.random.default_rng(0).integers(1, 41, count).tolist()
    return [{"input_ids": [i, *range(1000, 999 + n)], "labels": [i] * n} for i, n in enumerate(sizes)]


def stream(shards=1, count=COUNT, *, rank=0, window=STREAM_WINDOW, **options):
    source = Dataset.from_list(documents(count)).to_iterable_dataset(num_shards=shards)
    batching = Batching(**{"strategy": MINIBATCH, "batch_size": 2, **options})
    return PackedStream(source, batching, rank=rank, window=window)


def seen(batches):
    return Counter(d["input_ids"][0] for batch in batches for d in batch if d["input_ids"][0] < 1000)


SHARED = [(1, 0, 2), (4, 0, 3), (4, 2, 2), (1, 2, 1), (3, 0, 1)]
MORE = [(*reading, ranks) for reading in [(1, 0), (4, 0), (4, 2), (1, 2), (3, 0)] for ranks in (1, 2, 3)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shards", "workers", "world_size"), [*SHARED, *exhaustive(*(case for case in MORE if case not in SHARED))]
)
def test_every_document_once_in_a_pass(way, shards, workers, world_size):
    """Read for at least three passes: ranks together have begun no document more often than the passes say."""
    times, taken = Counter(), 0
    for rank in range(world_size):
        one = stream(shards, rank=rank, world_size=world_size, **WAYS[way])
        loader = DataLoader(one, batch_size=None, num_workers=workers, collate_fn=lambda batch: batch)
        batches = list(islice(loader, 4 * COUNT // (2 * world_size)))
        times, taken = times + seen(batches), taken + sum(len(d["input_ids"]) for batch in batches for d in batch)
    assert set(times) == set(range(COUNT))
    # Shards and workers go through passes at a pace of their own; within each, every document as often or once less,
    # but for those that wait in a buffer.
    spread = max(times.values()) - min(times.values())
    assert spread <= (1 if shards == 1 and way == "documents" else 3)
    assert taken == sum(len(documents()[i]["input_ids"]) * n for i, n in times.items()) or way == "wrapped"


def test_loader_workers_do_not_move_each_others_epoch():
    """Each read by chance began its shards anew when another worker was a pass ahead: now every read is the same."""

    def read():
        one = stream(4, rank=1, world_size=3, **WAYS["wrapped"])
        return list(islice(DataLoader(one, batch_size=None, num_workers=2, collate_fn=list), 80))

    first = read()
    assert all(read() == first for _ in range(4))


@pytest.mark.parametrize("way", WAYS)
def test_ranks_share_what_one_process_reads(way):
    """The same documents in the same rounds, whatever the number of ranks."""
    whole = list(islice(stream(batch_size=6, **WAYS[way]), 30))
    ranks = [list(islice(stream(rank=r, world_size=3, **WAYS[way]), 30)) for r in range(3)]
    together = [[document for rank in ranks for document in rank[i]] for i in range(30)]
    if way == "bfd":  # rounds of similar rows run in another order
        whole, together = ([list(chain(*batches))] for batches in (whole[:10], together[:10]))
    for one, many in zip(whole, together, strict=True):
        assert sorted(map(str, one)) == sorted(map(str, many)) or way == "bfd"
    assert seen(ranks[0]) != seen(ranks[1])  # the control: ranks read different documents


@settings(max_examples=20)
@given(way=st.sampled_from(sorted(WAYS)), stop=st.integers(1, 150), shards=st.integers(1, 3), rank=st.integers(0, 1))
def test_resumed_where_it_stopped(way, stop, shards, rank):
    """State after any micro-batch, through JSON: the same ones follow, after placeholders for those before."""
    options = {"rank": rank, "world_size": 2, **WAYS[way]}
    expected = list(islice(stream(shards, **options), stop + 20))
    first = stream(shards, **options)
    reader = iter(first)
    assert [next(reader) for _ in range(stop)] == expected[:stop]
    state = json.loads(json.dumps(first.state_dict()))
    resumed = stream(shards, **options)
    resumed.load_state_dict(state)
    again = list(islice(resumed, stop + 20))
    assert again[stop:] == expected[stop:]
    assert all(len(batch) == 1 and not any(batch[0]["input_ids"]) for batch in again[:stop])
    assert list(islice(resumed, stop + 20)) == again  # a second iteration begins at the same place


def test_rows_hold_their_capacity_and_nobody_waits_for_long():
    batches = list(islice(stream(batch_size=1, **WAYS["bfd"]), 300))
    assert max(sum(len(d["input_ids"]) for d in batch) for batch in batches) <= 40
    times = seen(batches)
    assert max(times.values()) - min(times.values()) <= 2


def test_wrapped_rows_are_full():
    batches = list(islice(stream(batch_size=1, **WAYS["wrapped"]), 100))
    assert {sum(len(d["input_ids"]) for d in batch) for batch in batches} == {40}
    tokens = [token for batch in batches for d in batch for token in d["input_ids"]]
    everything = [token for _ in range(3) for d in documents() for token in d["input_ids"]]
    assert tokens == everything[: len(tokens)]


def test_carrying_over_fills_rows():
    """Against the same buffers, each packed to its end."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 60, 4000)
    options = {"capacity": 100, "rows_per_batch": 1, "world_size": 1, "quadratic": 0, "rng": rng}
    alone, carried, waiting, rows = 0, 0, [], {"alone": 0, "carried": 0}
    for start in range(0, 4000, 100):
        window = lengths[start : start + 100]
        packed = pack_buffer(window, np.zeros(100), **options)
        alone += int(window.sum())
        rows["alone"] += len(packed.rounds) + -(-len(packed.carried) // 2)
        buffer = waiting + [(int(n), 0) for n in window]
        sizes, waited = (np.array(column) for column in zip(*buffer, strict=True))
        packed = pack_buffer(sizes, waited, **options)
        waiting = [(int(sizes[i]), int(waited[i]) + 1) for i in packed.carried]
        rows["carried"] += len(packed.rounds)
        carried += sum(int(sizes[row].sum()) for round_ in packed.rounds for row in round_)
    assert carried / (100 * rows["carried"]) > alone / (100 * rows["alone"])
    assert carried + sum(n for n, _ in waiting) == lengths.sum()


def test_rounds_are_level_over_the_ranks():
    """Rows run beside others like them: the busiest of four ranks has hardly more than its share."""
    lengths = np.random.default_rng(1).integers(1, 41, 1000)
    ranks = [stream(count=1000, **ROWS, window=500, rank=r, world_size=4, quadratic=1.0) for r in range(4)]
    assert lengths.max() == 40
    costs = np.array([[sum(len(d["input_ids"]) ** 2 for d in batch) for batch in islice(rank, 60)] for rank in ranks])
    shuffled = np.random.default_rng(0).permutation(costs.ravel()).reshape(4, -1)
    assert (costs.max(0) / costs.mean(0)).mean() < 0.5 + 0.5 * (shuffled.max(0) / shuffled.mean(0)).mean()


def test_a_shuffled_stream_is_read_again():
    source = Dataset.from_list(documents()).to_iterable_dataset()
    assert resumes_by_state(source) and resumes_by_state(source.map(dict))
    assert not resumes_by_state(source.shuffle(buffer_size=10)) and not resumes_by_state(source.shuffle().map(dict))


def test_an_empty_stream_is_refused():
    with pytest.raises(InvalidDataset, match="no document to train on"):
        empty = IterableDataset.from_generator(from_file, gen_kwargs={"rows": []})
        next(iter(PackedStream(empty, Batching(strategy=MINIBATCH, batch_size=2))))


def from_file(rows):
    yield from rows


@pytest.mark.parametrize(("strategy", "shuffled"), [
    ("step", False), ("bfd", True), ("minibatch", True), ("wrapped", False),
    *exhaustive(("step", True), ("bfd", False), ("minibatch", False), ("wrapped", True)),
])  # fmt: skip
def test_training_goes_on_in_a_later_pass(tmp_path, strategy, shuffled):
    """Six documents, four steps: the second pass is not the first one, and a resumed run is in it."""

    def trainer(out):
        source = IterableDataset.from_generator(from_file, gen_kwargs={"rows": documents(6)})
        source = source.map(lambda d: {"input_ids": [token % 50 for token in d["input_ids"]]})
        args = arguments(out=out, packing_strategy=strategy, max_length=64, max_steps=6, per_device_train_batch_size=2,
                         save_strategy="steps", save_steps=4, check_packing=False)  # fmt: skip
        source = source.shuffle(seed=0, buffer_size=3) if shuffled else source
        return packed_trainer(args, train_dataset=source, callbacks=[EpochEnds()])

    whole = trained(trainer(tmp_path / "whole"))
    resumed = trained(trainer(tmp_path / "resumed"), resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 6
    written = json.loads((tmp_path / "whole" / "checkpoint-4" / "packing_stream_0.json").read_text())
    assert (written["state"] is None) == shuffled
    assert epoch_ends(resumed) == [n for n in epoch_ends(whole) if n > 4]


def epoch_ends(trainer):
    (found,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, EpochEnds)]
    return found.steps


@pytest.mark.parametrize(("strategy", "workers"), [
    ("padded", 0), ("step", 2), ("minibatch", 0), *exhaustive(("padded", 2), ("step", 0), ("minibatch", 2)),
])  # fmt: skip
def test_an_epoch_ends_with_a_pass(tmp_path, strategy, workers):
    """Evaluated and saved after each pass, as by TRL; a pass that ends inside a step ends the epoch with it."""
    options = {"max_steps": 9, "per_device_train_batch_size": 2, "eval_strategy": "epoch", "save_strategy": "epoch",
               "max_length": 64, "dataloader_num_workers": workers}  # fmt: skip
    own = {} if strategy == "padded" else {"packing_strategy": strategy, "check_packing": False}
    args = arguments(SFTConfig if strategy == "padded" else PackedSFTConfig, tmp_path, **options, **own)
    data = dataset(12).to_iterable_dataset(num_shards=max(workers, 1))
    built = packed_trainer(args, cls=SFTTrainer if strategy == "padded" else PackedSFTTrainer, train_dataset=data,
                           eval_dataset=dataset(4, seed=1), callbacks=[EpochEnds()])  # fmt: skip
    trained(built)
    history = built.state.log_history
    assert epoch_ends(built) == [6, 9] == [entry["step"] for entry in history if "eval_loss" in entry]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-9"]
    assert [round(entry["epoch"], 2) for entry in history if "loss" in entry][5:7] == [0.67, 1.11]


def test_a_look_at_the_loader_takes_nothing_from_the_run(tmp_path):
    """A callback that reads the first batches of a stream, as stock allows; the control does not."""

    class Peek(TrainerCallback):
        def on_train_begin(self, *args, train_dataloader=None, **kwargs):
            next(iter(train_dataloader))

    args = arguments(out=tmp_path, max_length=64, packing_strategy="minibatch", max_steps=3, check_packing=False)
    runs = [losses(trained(packed_trainer(args, train_dataset=dataset(12).to_iterable_dataset(), callbacks=more)))
            for more in ([], [Peek()])]  # fmt: skip
    assert runs[0] == runs[1]


def test_a_resumed_stream_is_not_read_from_its_beginning(tmp_path):
    read = []

    def mapped(document):
        read.append(document["input_ids"][0])
        return {column: [token % 50 for token in document[column]] for column in ("input_ids", "labels")}

    def trainer(**options):
        source = Dataset.from_list(documents(400)).to_iterable_dataset().map(mapped)
        args = arguments(out=tmp_path, packing_strategy="minibatch", max_length=64, max_steps=80, save_steps=70,
                         save_strategy="steps", check_packing=False, **options)  # fmt: skip
        return packed_trainer(args, train_dataset=source)

    trainer().train()
    for options, again in (({}, False), ({"seed": 7}, True)):
        resumed = trainer(**options)
        read.clear()
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-70"))
        assert (0 in read) == again
