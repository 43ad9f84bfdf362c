"""Refusals of `sequence_parallel`, each in a sentence with its reason; the runs themselves need several processes
(`tests/whole/test_sharded_rows.py`)."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import tiny
import torch
import vision
from accelerate import ParallelismConfig
from tiny_models import small_model
from torch.utils.data import SequentialSampler
from training import arguments, dataset, packed_trainer
from trl import SFTTrainer

import trl_packfa
from trl_packfa import PackedSFTConfig, padding_free
from trl_packfa.comparison import Comparison
from trl_packfa.config.requirements import require
from trl_packfa.data.steps import StepSampler
from trl_packfa.errors import ContaminationError, InvalidConfig, UnsupportedModel, VersionTooOld
from trl_packfa.parallel.ranks import RowGroups, refuse_short_rows, share_rows
from trl_packfa.parallel.trainer import ShardedRowsTrainer
from trl_packfa.trainers.requirements.built import PATCHED
from trl_packfa.trainers.requirements.training import Training
from trl_packfa.trainers.sft.memory import estimate, shape_of, shared_by


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
    "images": (1, {}, {"train_dataset": vision.prompts()}, "but the dataset has images in its column 'image'"),
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
