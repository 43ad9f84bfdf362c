"""Ways to divide a model or a row that packing cannot serve: each is refused with its reason. And what ranks agree on,
seen from one process."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, load_checkpoint_and_dispatch
from tiny_models import small_model
from torch.utils.data import DataLoader, SequentialSampler
from training import arguments, packed_trainer, trained

import trl_packfa
from trl_packfa import PackedSFTTrainer
from trl_packfa.config.requirements import require
from trl_packfa.data.steps import StepSampler, rank_loader
from trl_packfa.errors import ContaminationError, InvalidConfig, InvalidDataset, UnsupportedModel, VersionTooOld
from trl_packfa.parallel import ranks
from trl_packfa.trainers.loading import _tell_idle_gpus, init_kwargs
from trl_packfa.trainers.requirements.built import PATCHED
from trl_packfa.trainers.requirements.runs import parallel_sizes
from trl_packfa.trainers.requirements.training import Training
from trl_packfa.trainers.saving.checkpoint_files import PACKING_REPORT, last_whole_checkpoint, read_progress


@pytest.mark.parametrize(("size", "reason"), [
    ("tp_size", "ranks that share a layer need the same rows"),
    ("cp_size", "attention across the cut has no document boundaries"),
    ("sp_size", "inside the attention that packing replaces"),
])  # fmt: skip
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_divided_rows_and_layers_are_refused(tmp_path, monkeypatch, size, reason, by):
    config = ParallelismConfig(**{size: 2})
    if by == "environment":  # as accelerate launch does
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{size.upper()}", "2")
        config = None
    args = arguments(out=tmp_path, parallelism_config=config)
    with pytest.raises(InvalidConfig, match=rf"{size}=2 cannot be packed(.|\n)*{reason}(.|\n)*FSDP2"):
        packed_trainer(args)


@pytest.mark.parametrize("kwargs", [{"tp_size": 2}, {"distributed_config": {"tp_size": 2}}])
def test_a_model_that_would_be_loaded_in_parts_is_refused(tmp_path, kwargs):
    with pytest.raises(InvalidConfig, match="tp_size=2 cannot be packed"):
        packed_trainer(arguments(out=tmp_path, model_init_kwargs=kwargs), model="never-loaded")
    sharded = arguments(out=tmp_path, parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert set(parallel_sizes(sharded).values()) == {1}, "data parallelism is no division"


@pytest.mark.parametrize("size", ["tp_size", "ep_size", "pp_size"])
def test_a_model_that_was_loaded_in_parts_is_refused(tmp_path, size):
    model = tiny.model(layers=2)
    model.config.distributed_config = SimpleNamespace(**{size: 2})
    with pytest.raises(InvalidConfig, match=f"{size}=2 cannot be packed"):
        packed_trainer(arguments(out=tmp_path), model=model)


def under_deepspeed(out, config, *, stage=3, **options):
    """Arguments that keep DeepSpeed's plugin, for which DeepSpeed itself need not be installed."""
    args = arguments(out=out, **options)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    return args


@pytest.mark.parametrize(("stage", "config", "options", "message"), [
    (3, {"fp16": {"enabled": True}}, {}, r"fp16 under DeepSpeed ZeRO-3 cannot be packed(.|\n)*bf16=True"),
    # transformers makes `fp16_full_eval` of the config's "auto" when it builds the engine.
    (3, {"fp16": {"enabled": "auto"}}, {"fp16_full_eval": True}, "fp16 under DeepSpeed ZeRO-3 cannot be packed"),
    (1, {"tensor_parallel": {"autotp_size": 2}}, {}, "tp_size=2 cannot be packed"),
])  # fmt: skip
@pytest.mark.parametrize("strategy", ["step", "minibatch"])
def test_what_deepspeed_divides_is_refused(tmp_path, stage, config, options, message, strategy):
    args = under_deepspeed(tmp_path, config, stage=stage, packing_strategy=strategy, **options)
    with pytest.raises(InvalidConfig, match=message):
        packed_trainer(args)


@pytest.mark.parametrize("found", [None, "0.17.5"])
def test_a_deepspeed_whose_zero3_cannot_be_checked_is_refused(tmp_path, monkeypatch, found):
    monkeypatch.setattr("trl_packfa.trainers.requirements.runs.installed_version", lambda package: found)
    with pytest.raises(VersionTooOld, match=rf"ZeRO-3 needs deepspeed >= .*found {found or 'none'}\.(.|\n)*FSDP2"):
        packed_trainer(under_deepspeed(tmp_path, {}))


def test_weights_in_parts_without_an_engine_are_refused():
    """As DeepSpeed marks them; `check` would run on empty tensors."""
    model = trl_packfa.patch(tiny.model(layers=2))
    next(model.parameters()).ds_shape = torch.Size([97, 64])
    with pytest.raises(UnsupportedModel, match=r"split \(DeepSpeed ZeRO-3\)(.|\n)*trainer.model_wrapped"):
        trl_packfa.check(model)


def refused_under(fsdp_plugin, model):
    state = SimpleNamespace(fsdp_plugin=fsdp_plugin)
    trainer = SimpleNamespace(is_checked_wrapped=True, accelerator=SimpleNamespace(state=state),
                              neftune_noise_alpha=None, train_dataset=None)  # fmt: skip
    require(PATCHED, Training(arguments(), "a trainer", model=trl_packfa.patch(model), trainer=trainer))


@pytest.mark.parametrize(("kind", "named"), [("openai-gpt", "the backbone"), ("mamba2", r"layers.0.mixer, layers.1")])
def test_zero3_refuses_modules_that_run_by_document(kind, named):
    with pytest.raises(InvalidConfig, match=rf"ZeRO-3 cannot run {named}(.|\n)*ranks would use(.|\n)*ZeRO-2"):
        refused_under(None, small_model(kind))
    refused_under(None, tiny.model(layers=2))  # whose modules run once


def test_fsdp2_gathers_whole_layers(monkeypatch, tmp_path):
    """A mixer may run as often as it likes within its layer; a backbone that runs per group of documents may not."""
    fsdp2 = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    refused_under(fsdp2, small_model("mamba"))
    with pytest.raises(InvalidConfig, match="FSDP2 cannot run the backbone"):
        refused_under(fsdp2, small_model("openai-gpt"))
    monkeypatch.setattr(PackedSFTTrainer, "is_checked_wrapped", True)
    with pytest.raises(InvalidConfig, match=r"cannot run the backbone(.|\n)*DDP or ZeRO-2"):
        packed_trainer(arguments(out=tmp_path), model=small_model("openai-gpt", vocab_size=97))


@pytest.mark.parametrize("policy", [
    {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1},
    {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Conv1d"]},
], ids=["by size", "by class"])  # fmt: skip
def test_fsdp2_that_gathers_inside_a_mixer_is_refused(policy):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    with pytest.raises(InvalidConfig, match=r"FSDP2 cannot run layers.0.mixer, layers.1.mixer(.|\n)*ranks would use"):
        refused_under(plugin, small_model("mamba"))
    if "min_num_params" in policy:
        plugin.min_num_params = 10**9  # as whole as can be
        refused_under(plugin, small_model("mamba"))
        refused_under(FullyShardedDataParallelPlugin(fsdp_version=2, **policy), tiny.model(layers=2))


def test_nothing_is_checked_before_zero3_has_wrapped_the_model(tmp_path, monkeypatch):
    trainer = packed_trainer(arguments(out=tmp_path))
    monkeypatch.setattr(type(trainer), "is_zero3_enabled", True)
    with pytest.raises(UnsupportedModel, match=r"has not wrapped the model yet(.|\n)*train\(\)"):
        trainer.check()


def test_each_micro_batch_of_a_step_says_whether_it_is_the_last(tmp_path):
    """DeepSpeed's engine reduces and steps when `accelerator.backward` is told so."""
    trainer, told = packed_trainer(arguments(out=tmp_path, max_tokens_per_microbatch=100, check_packing=False)), []
    backward = trainer.accelerator.backward

    def watched(*args, **kwargs):
        told.append((trainer.state.global_step, trainer.accelerator.sync_gradients))
        backward(*args, **kwargs)

    trainer.accelerator.backward = watched
    trainer.train()
    for step in range(3):
        assert [last for at, last in told if at == step][-1] is True
        assert [last for at, last in told if at == step].count(True) == 1
    assert len(told) > 3


def test_offloaded_models_are_exact_but_not_trained(tmp_path):
    """The second layer lies on the disk."""
    tiny.model(layers=2).save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    options = {"device_map": places, "offload_folder": str(tmp_path / "disk")}
    offloaded = load_checkpoint_and_dispatch(tiny.model(layers=2), tmp_path / "model", **options)
    trl_packfa.patch(offloaded)
    assert trl_packfa.check(offloaded.requires_grad_(False)).is_exact
    with pytest.raises(InvalidConfig, match=r"offloaded weights(.|\n)*backward pass"):
        packed_trainer(arguments(out=tmp_path), model=offloaded)


def two_ranks(monkeypatch, other):
    """An accelerator of two processes, whose other one sends this."""
    monkeypatch.setattr(ranks, "gather_object", lambda mine: [*mine, other])
    return SimpleNamespace(num_processes=2, is_main_process=True)


def test_what_fails_on_one_rank_fails_on_all(monkeypatch):
    accelerator = two_ranks(monkeypatch, (ContaminationError, "leak"))
    with pytest.raises(ContaminationError, match=r"^rank 1 of 2: leak$"):
        ranks.agree(accelerator, lambda: "fine here")
    with pytest.raises(RuntimeError, match=r"rank 0 of 2: ZeroDivisionError: (.|\n)*rank 1 of 2: leak"):
        ranks.agree(accelerator, lambda: 1 / 0)
    assert ranks.agree(two_ranks(monkeypatch, None), lambda: "fine") == "fine"


def test_ranks_with_other_documents_are_refused(monkeypatch):
    lengths = np.arange(5)
    with pytest.raises(InvalidDataset, match=r"rank 0 5 \((.|\n)*rank 1 6 \("):
        ranks.require_same_documents(two_ranks(monkeypatch, (6, 7)), lengths)
    ranks.require_same_documents(SimpleNamespace(num_processes=1), lengths)


def test_what_ranks_count_is_not_cut_at_the_end_of_an_epoch():
    """accelerate takes a number of each rank for an example, of which the last batch may repeat some: the control."""
    args, of_ranks = arguments(), torch.tensor([5, 7])
    accelerator = Accelerator(cpu=True)
    dealt = iter(accelerator.prepare(DataLoader(range(3), batch_size=2)))
    assert len(next(dealt)) == 2 and accelerator.gather_for_metrics(of_ranks).tolist() == [5, 7]
    assert len(next(dealt)) == 1 and accelerator.gather_for_metrics(of_ranks).tolist() == [5]
    assert next(dealt, None) is None
    sampler = StepSampler(SequentialSampler(range(3)), args, accelerator, size=2, plans=False)
    ours = iter(rank_loader(range(3), sampler, torch.tensor, args, accelerator))
    for rows in (2, 1):
        assert len(next(ours)) == rows and accelerator.gather_for_metrics(of_ranks).tolist() == [5, 7]
    assert next(ours, None) is None


class Killed(BaseException):
    pass


def killed_before_its_report(trainer):
    def die(folder):
        raise Killed

    trainer.save_reports = die
    with pytest.raises(Killed):
        trainer.train()


def test_the_old_checkpoint_goes_only_after_the_new_one_is_whole(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "check_packing": False}
    packed_trainer(arguments(out=tmp_path, max_steps=1, **options)).train()  # checkpoint-1, at the end
    killed_before_its_report(packed_trainer(arguments(out=tmp_path, max_steps=2, **options)))
    assert (tmp_path / "checkpoint-2").exists()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    killed_before_its_report(packed_trainer(arguments(out=tmp_path, max_steps=1, **options)))
    assert last_whole_checkpoint(tmp_path) is None, "while it is written again"


def test_rotation_keeps_what_it_should(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "check_packing": False}
    trainer = trained(packed_trainer(arguments(out=tmp_path, **saving)))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    assert trainer.args.save_total_limit == 2
    assert read_progress(tmp_path / "checkpoint-3")["num_tokens"] > 0
    assert not list(tmp_path.glob("checkpoint-*/*.partial"))
    assert json.loads((tmp_path / "checkpoint-3" / PACKING_REPORT).read_text())["train"]


def test_a_model_by_name_is_loaded_onto_one_of_several_gpus():
    args = arguments()
    for device, places in {"cpu": None, "mps": None, "cuda:0": {"": "cuda:0"}, "xpu:1": {"": "xpu:1"}}.items():
        there = SimpleNamespace(**{**vars(args), "device": torch.device(device)})
        assert init_kwargs(there)["device_map"] == places
        there.model_init_kwargs = {"device_map": "auto"}
        assert init_kwargs(there)["device_map"] == "auto"


def test_other_gpus_of_one_process_stay_idle_which_is_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    args = arguments(disable_tqdm=False, per_device_train_batch_size=3)
    args._n_gpu = 4
    assert args.n_gpu == 1 and args.train_batch_size == 3
    _tell_idle_gpus(args)
    assert "one of 4 visible GPUs. `accelerate launch`" in capsys.readouterr().err
    args.model_init_kwargs = {"device_map": "auto"}
    _tell_idle_gpus(args)
    assert not capsys.readouterr().err
