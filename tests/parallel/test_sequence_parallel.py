"""Batches cut for several ranks, and models that run the parts: logits, losses and gradients of the whole row. What
`sequence_parallel` refuses; the runs themselves need several processes (`tests/whole/test_sharded_rows.py`)."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import tiny
import torch
import vision
from accelerate import ParallelismConfig
from ranks import Ranks
from tiny_models import small_model
from tolerance import assert_float32, assert_recomputed, differs
from torch.utils.data import SequentialSampler
from training import arguments, dataset, packed_trainer
from trl import SFTTrainer

import trl_packfa
from trl_packfa import DataCollatorForPacking, PackedLayout, PackedSFTConfig, padding_free, shard_batch
from trl_packfa.comparison import Comparison
from trl_packfa.config.requirements import require
from trl_packfa.data.steps import StepSampler
from trl_packfa.errors import ContaminationError, InvalidConfig, InvalidLayout, UnsupportedModel, VersionTooOld
from trl_packfa.layout.shard import RowShard
from trl_packfa.parallel import sequence_parallel
from trl_packfa.parallel.ranks import RowGroups, refuse_short_rows, share_rows
from trl_packfa.parallel.trainer import ShardedRowsTrainer
from trl_packfa.plan.memory import estimate, shape_of, shared_by
from trl_packfa.trainers.requirements.built import PATCHED
from trl_packfa.trainers.requirements.training import Training


def experts(model):
    """Let experts multiply one after the other: torch's grouped product takes no float64."""
    model.set_experts_implementation("eager")
    return model


LENGTHS = (13, 1, 29, 7, 21)  # 71 tokens: two ranks share 72, four as well
KINDS = {
    **{name: lambda name=name: tiny.model(name, layers=2) for name in ("llama", "qwen3", "gemma2")},
    "gpt_oss": lambda: experts(small_model("gpt_oss", num_attention_heads=4, num_key_value_heads=2)),
    # tables of the whole row: frequencies depend on a document's length
    "long rope": lambda: tiny.model("phi3-longrope", layers=2),
    "dynamic rope": lambda: tiny.model("llama-dynamic", layers=2),
    # a causal LM that passes nothing on, and learned positions
    "gpt2": lambda: small_model("gpt2", num_attention_heads=4, num_hidden_layers=2),
}


def batch_of(lengths=LENGTHS, vocabulary=90):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return DataCollatorForPacking(return_flash_attn_kwargs=False)([{"input_ids": ids} for ids in documents])


def run(model, batch):
    labels = batch.get("shift_labels")
    if labels is None:
        labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    call = {name: value for name, value in batch.items() if "labels" not in name}
    logits = model(**call, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach()[0], loss.detach(), gradients


def shared(monkeypatch, model, batch, size, cut=shard_batch):
    """Return what all ranks make together: logits, the sum of the losses, and the sum of the gradients."""
    models = [trl_packfa.patch(copy.deepcopy(model)) for _ in range(size)]
    parts = Ranks(size).run(monkeypatch, lambda shard: run(models[shard.rank], cut(batch, shard)))
    names = parts[0][2]
    logits = torch.cat([part[0] for part in parts])[: batch["input_ids"].numel()]
    return logits, sum(part[1] for part in parts), {name: sum(part[2][name] for part in parts) for name in names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_row_of_one(monkeypatch, kind, size):
    model, batch = KINDS[kind]().double(), batch_of()
    expected = run(trl_packfa.patch(copy.deepcopy(model)), batch)
    found = shared(monkeypatch, model, batch, size)
    assert_float32(found[0], expected[0])  # norms and rotations compute in float32
    assert_float32(found[1], expected[1])
    for name, gradient in expected[2].items():
        assert_recomputed(found[2][name].float(), gradient.float())


def test_transformers_own_losses_add_up(monkeypatch):
    model, batch = KINDS["llama"]().double(), batch_of()
    models = [trl_packfa.patch(copy.deepcopy(model)) for _ in range(2)]
    expected = models[0](**batch, num_items_in_batch=10).loss

    def loss(shard):
        return models[shard.rank](**shard_batch(batch, shard), num_items_in_batch=10).loss.detach()

    parts = Ranks(2).run(monkeypatch, loss)
    assert_float32(sum(parts), expected.detach())
    assert differs(parts[0] * 2, expected.detach())


def test_labels_that_are_cut_before_they_are_shifted_are_not_those_of_one(monkeypatch):
    """The control: the last token of a part has no label."""

    def cut(batch, shard):
        part = shard_batch(batch, shard)
        part["shift_labels"][:, -1] = -100
        return part

    model, batch = KINDS["llama"]().double(), batch_of()
    expected = run(trl_packfa.patch(copy.deepcopy(model)), batch)
    assert differs(shared(monkeypatch, model, batch, 2, cut)[1], expected[1])


def test_a_batch_is_cut_into_parts_of_one_row():
    batch = {**batch_of((3, 4)), "weights": torch.arange(7.0)[None], "source": "a"}
    parts = [shard_batch(batch, RowShard(rank, 2)) for rank in range(2)]
    assert [part["input_ids"].shape for part in parts] == [(1, 4), (1, 4)]
    names = ("input_ids", "position_ids", "shift_labels")
    ids, positions, told = (torch.cat([part[name] for part in parts], dim=1).tolist()[0] for name in names)
    assert ids == [*batch["input_ids"][0].tolist(), 0] and positions == [0, 1, 2, 0, 1, 2, 3, 0]
    # The last token of a document predicts nothing, and the label of the first token of a part is not lost.
    labels = batch["labels"][0].tolist()
    assert told == [*labels[1:3], -100, *labels[4:7], -100, -100]
    layout = parts[1]["packed_layout"]
    assert layout.lengths == (3, 4, 1) and layout.padding == 1 and layout.local_shape == (1, 4)
    assert parts[0]["weights"].tolist() == [[0.0, 1.0, 2.0, 3.0]] and parts[0]["source"] == "a"
    assert layout.to("cpu").shard is layout.shard and layout.whole.shard is None


def test_a_row_shorter_than_its_ranks_is_padded():
    parts = [shard_batch(batch_of((2,)), RowShard(rank, 4)) for rank in range(4)]
    assert [part["input_ids"].numel() for part in parts] == [1] * 4
    assert [int((part["shift_labels"] != -100).sum()) for part in parts] == [1, 0, 0, 0]


def test_rows_of_a_batch_become_one(monkeypatch):
    ids = torch.randint(1, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "packed_layout": PackedLayout.from_lengths([2, 4, 6], rows=2)}
    model = KINDS["llama"]().double()
    expected = trl_packfa.patch(copy.deepcopy(model))(**{k: v for k, v in batch.items() if k != "labels"}).logits
    found = shared(monkeypatch, model, batch, 2)[0]
    assert_float32(found, expected.flatten(0, 1))


def test_batches_without_boundaries_are_refused():
    ids = torch.ones((1, 4), dtype=torch.long)
    with pytest.raises(InvalidLayout, match=r"without document boundaries cannot be shared(.|\n)*packed_layout"):
        shard_batch({"input_ids": ids}, RowShard(0, 2))


def test_positions_of_several_axes_are_refused():
    batch = batch_of()
    with pytest.raises(InvalidLayout, match=r"position_ids of shape \(3, 1, 71\) cannot be cut"):
        shard_batch({**batch, "position_ids": batch["position_ids"].expand(3, 1, -1)}, RowShard(0, 2))


def test_tokens_that_are_not_the_part_are_refused():
    batch = batch_of()
    layout = shard_batch(batch, RowShard(0, 2))["packed_layout"]
    with pytest.raises(InvalidLayout, match=r"72 tokens is shared, each process holds 36(.|\n)*shard_batch"):
        trl_packfa.patch(KINDS["llama"]())(input_ids=batch["input_ids"], packed_layout=layout)


@pytest.mark.parametrize(("kind", "reason"), [
    ("mamba", "documents run one by one in MambaMixer"),
    ("openai-gpt", "the backbone runs document by document"),
    ("bloom", "adds a bias to the scores"),
])  # fmt: skip
def test_models_that_need_whole_rows_are_refused(kind, reason):
    model = trl_packfa.patch(small_model(kind, num_hidden_layers=1))
    said = rf"does not support sequence_parallel=2(.|\n)*{reason}(.|\n)*sequence_parallel=1"
    with pytest.raises(UnsupportedModel, match=said):
        model(**shard_batch(batch_of(vocabulary=40), RowShard(0, 2)))


def test_a_process_outside_of_the_group_is_refused(monkeypatch):
    monkeypatch.setattr(sequence_parallel.distributed, "get_rank", lambda group: -1)
    with pytest.raises(InvalidConfig, match="this process is not in the group"):
        RowShard.of(object())


@pytest.fixture
def processes(monkeypatch):
    """Let arguments believe in this many processes."""

    def pretend(count, rank=0):
        monkeypatch.setattr(PackedSFTConfig, "world_size", count)
        monkeypatch.setattr(PackedSFTConfig, "process_index", rank)

    return pretend


# Processes, what else the config asks for and what the trainer is given, and what is said.
REFUSED = {
    "more than the processes": (1, {}, {},
                                r"sequence_parallel=2 does not divide the number of processes, 1(.|\n)*torchrun"),
    "unequal groups": (3, {}, {}, "sequence_parallel=2 does not divide the number of processes, 3"),
    "a loss function": (2, {}, {"compute_loss_func": lambda *args, **kwargs: None},
                        r"compute_loss_func with sequence_parallel=2(.|\n)*logits of the whole row"),
    "images": (1, {}, {"train_dataset": vision.prompts}, "but the dataset has images in its column 'image'"),
    **{name: (2, {name: value}, {}, rf"{name}.* with sequence_parallel=2 cannot be trained(.|\n)*Drop {name}|{name}")
       for name, value in (("parallelism_config", ParallelismConfig(dp_shard_size=2)), ("label_smoothing_factor", 0.1),
                           ("share_prefixes", True), ("expand_turns", True), ("neftune_noise_alpha", 5.0))},
    "group_by_length": (2, {"packing_strategy": "minibatch", "train_sampling_strategy": "group_by_length"}, {},
                        "group_by_length"),
    **{size: (2, {"parallelism_config": ParallelismConfig(**{size: 2})}, {},
              rf"{size}=2 cannot be packed(.|\n)*sequence_parallel=N") for size in ("cp_size", "sp_size")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_shared_are_refused(tmp_path, processes, case):
    count, asked, given, message = REFUSED[case]
    processes(count)
    args = arguments(out=tmp_path, sequence_parallel=2, **asked)
    # Made here: the environments of `make test-versions` collect this file and have no Pillow.
    given = {name: value() if name == "train_dataset" else value for name, value in given.items()}
    with pytest.raises(InvalidConfig, match=message):
        packed_trainer(args, **given)


def test_a_trainer_that_was_not_measured_is_refused(tmp_path, processes, monkeypatch):
    processes(2)
    monkeypatch.setattr("trl_packfa.trainers.requirements.runs.installed_version", lambda package: "5.16.0")
    with pytest.raises(VersionTooOld, match=r"sequence_parallel=2 needs transformers >= 5.23.0, found 5.16.0"):
        packed_trainer(arguments(out=tmp_path, sequence_parallel=2))


def test_padded_rows_are_refused(tmp_path):
    args = arguments(out=tmp_path, packing=False)
    args.sequence_parallel = 2
    trainer = SFTTrainer(tiny.model(layers=2), args, train_dataset=dataset(), processing_class=tiny.tokenizer())
    with pytest.raises(InvalidConfig, match=r"SFTTrainer with sequence_parallel=2 cannot run without its pads"):
        padding_free(trainer)


def require_shareable(model, size):
    """Hold a patched model against the table, in a trainer without anything of its own."""
    trainer = SimpleNamespace(neftune_noise_alpha=None, replaced=lambda name: "", is_checked_wrapped=False,
                              train_dataset=None)  # fmt: skip
    require(PATCHED, Training(SimpleNamespace(sequence_parallel=size), "a trainer", model=model, trainer=trainer))


def test_heads_that_processes_cannot_divide_are_refused():
    """Four heads."""
    model = trl_packfa.patch(tiny.model(layers=2))
    with pytest.raises(InvalidConfig, match=r"sequence_parallel=3 does not divide the model's 4 (.|\n)*\[1, 2, 4\]"):
        require_shareable(model, 3)
    for size in (1, 2, 4):
        require_shareable(model, size)


def test_mixers_are_refused():
    model = trl_packfa.patch(small_model("mamba", num_hidden_layers=1))
    said = r"does not support sequence_parallel=2(.|\n)*MambaMixer(.|\n)*fsdp=True"
    with pytest.raises(UnsupportedModel, match=said):
        require_shareable(model, 2)


def test_rows_shorter_than_their_processes_are_refused():
    refuse_short_rows(SimpleNamespace(sequence_parallel=4), 4)
    with pytest.raises(InvalidConfig, match="sequence_parallel=4, but no micro-batch has more than 3 tokens"):
        refuse_short_rows(SimpleNamespace(sequence_parallel=4), 3)


def test_a_row_that_differs_is_refused():
    row = Comparison("shared row", 2e-7, 1e-3, of="2")
    gradients = Comparison("shared row gradients", 1e-6, 3e-4, "lm_head.weight", of="2")
    row.require()
    gradients.require()
    with pytest.raises(ContaminationError, match=r"2 processes share are not exact.*log-probabilities is off"):
        row._replace(difference=0.1).require()
    for wrong in (0.5, float("nan")):
        with pytest.raises(ContaminationError, match=r"the gradient of lm_head\.weight is off by"):
            gradients._replace(difference=wrong).require()


@pytest.mark.parametrize(
    ("count", "size", "groups"), [(8, 2, [0, 0, 1, 1, 2, 2, 3, 3]), (4, 4, [0] * 4), (2, 1, [0, 1])]
)
def test_a_group_counts_as_one_process(tmp_path, processes, count, size, groups):
    found = []
    for rank in range(count):
        processes(count, rank)
        args = arguments(out=tmp_path, sequence_parallel=size)
        found.append(args.data_parallel_rank)
    assert found == groups and args.data_parallel_size == count // size


def test_accelerate_gets_the_groups(tmp_path, processes):
    processes(4)
    args = arguments(out=tmp_path, sequence_parallel=2)
    share_rows(args)
    config = args.parallelism_config
    assert config.shape == (2, 2) and config.total_size == 4 and config.tp_size == 1
    config.device_mesh = torch.nn.Identity  # a mesh, whose process groups cannot be saved
    for saved in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert isinstance(saved, RowGroups) and saved.shape == (2, 2) and saved.device_mesh is None
    share_rows(args)  # of a second trainer
    assert args.parallelism_config is not config


def test_ranks_of_a_group_get_the_batches_of_one_process(processes):
    """Two groups of two, batches of two rows: ranks 0 and 1 get those that rank 0 of two processes gets."""

    def batches(rank, world_size, **options):
        args = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=world_size, dataloader_drop_last=False,
                               gradient_accumulation_steps=2)  # fmt: skip
        whole = SimpleNamespace(even_batches=True)
        return list(StepSampler(SequentialSampler(range(9)), args, whole, size=2, plans=False))

    config = PackedSFTConfig("out", use_cpu=True, bf16=False, sequence_parallel=2)
    ranks = []
    for rank in range(4):
        processes(4, rank)
        ranks.append(batches(config.data_parallel_rank, config.data_parallel_size))
    assert ranks[0] == ranks[1] == batches(0, 2) == [[0, 1], [4, 5], [8, 0]]
    assert ranks[2] == ranks[3] == batches(1, 2) == [[2, 3], [6, 7], [1, 2]]


@pytest.mark.parametrize(("ends", "expected"), [(False, [0, 1, 4, 5]), (True, [0, 1, 4])])
def test_results_of_a_group_are_taken_once(ends, expected):
    """Two groups of two, two results each; at the end of the data the last one is a repetition."""
    trainer = ShardedRowsTrainer.__new__(ShardedRowsTrainer)
    trainer.args = SimpleNamespace(sequence_parallel=2, data_parallel_size=2)
    state = SimpleNamespace(end_of_dataloader=ends, remainder=3)
    trainer.accelerator = SimpleNamespace(gradient_state=state, gather=lambda found: torch.arange(8))
    assert trainer._gather_groups(torch.arange(2)).tolist() == expected


def test_memory_of_activations_is_divided(tmp_path):
    args = arguments(out=tmp_path)
    shape = shape_of(tiny.model(layers=2), args)
    whole, half = (estimate(shape, shared_by(args, size), 1001) for size in (1, 2))
    assert half.activations == whole.activations * 501 / 1001 and half.weights == whole.weights
