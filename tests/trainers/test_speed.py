"""Counts of arithmetic, time and memory: what a run logs of its speed, and what is estimated of its memory."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import memory_table
import numpy as np
import pytest
import tiny
import torch
from operations import OperationCounter, kept_bytes
from peft import LoraConfig, get_peft_model
from pretended_liger import pretend_liger
from tiny_models import small_model
from tolerance import assert_estimate
from training import arguments, dataset, logs_of, lora_config, packed_trainer, slow_down
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packfa import DataCollatorForPacking, PackedSFTConfig, patch
from trl_packfa.bench.presets import preset_config
from trl_packfa.data import epoch_plan, flops, templates
from trl_packfa.data.flops import ModelFlops, attention_heads, experts_of_token, quadratic_weight
from trl_packfa.errors import figure
from trl_packfa.plan import memory
from trl_packfa.trainers import clock, packed_run
from trl_packfa.trainers.clock import TrainingClock
from trl_packfa.trainers.sft import throughput, trainer
from trl_packfa.trainers.sft.datasheet import datasheet_flops, named_flops
from trl_packfa.trainers.sft.throughput import SpeedMeter


def test_model_flops_are_those_that_torch_counts():
    config, tokens = preset_config("tiny"), 40
    model = tiny.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with OperationCounter() as counter, torch.no_grad():
        model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    full = PackedSFTConfig("out", use_peft=False, use_cpu=True, bf16=False)
    # Training is three forwards; a forward without the causal mask's half sees twice as much.
    needed = ModelFlops.planned(config, full)
    assert needed.per_token(seen=2 * tokens) * tokens / 3 == pytest.approx(counter.flops, abs=0.02 * counter.flops)
    lora = PackedSFTConfig("out", lora_r=4, use_cpu=True, bf16=False)
    weights = needed.per_token(seen=0) / 6
    assert 4 * weights < ModelFlops.planned(config, lora).per_token(seen=0) < 6 * weights
    assert needed.per_token(seen=0, trained=0.25) == needed.body + needed.head / 4


def test_an_adapter_costs_its_own_and_no_gradient_of_the_base():
    model = tiny.model(layers=2)
    whole = ModelFlops.of(model)
    trainer = packed_trainer(arguments(), model=model)
    adapter = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert ModelFlops.of(trainer.model).body == pytest.approx(whole.body * 4 / 6 + 6 * adapter)
    assert ModelFlops.of(tiny.model("mistral", layers=2)).attention == 3 * 2 * 64 * 2


def test_a_head_that_is_no_linear_layer_counts_as_one():
    model, head = tiny.model(layers=1), torch.nn.Module()
    as_linear, head.weight = ModelFlops.of(model), model.lm_head.weight
    model.lm_head = head
    assert ModelFlops.of(model) == as_linear and as_linear.head > 0


def test_what_is_trained_in_full_beside_an_adapter_counts_once():
    """PEFT's `modules_to_save` keeps the original module beside the trained copy."""
    adapters = (
        LoraConfig(target_modules=["q_proj"], modules_to_save=saved) for saved in (None, ["lm_head", "o_proj"])
    )
    plain, beside = (ModelFlops.of(get_peft_model(tiny.model(layers=1), adapter)) for adapter in adapters)
    weights = tiny.model(layers=1).model.layers[0].self_attn.o_proj.weight.numel()
    assert beside.body == plain.body + 2 * weights  # their own gradient
    assert beside.head == plain.head * 6 / 4


@pytest.mark.parametrize("name", ["gemma4_text", "mixtral", "ernie4_5_moe", "hunyuan_v1_moe"])
def test_experts_count_as_often_as_a_token_passes_them(name):
    """Whatever the config calls their number: the small models have four, and a token passes two."""
    model = small_model(name)
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert stacked and experts_of_token(model.config.get_text_config()) == 2
    with_experts = ModelFlops.of(model).body
    for p in model.parameters():
        p.requires_grad = p.dim() != 3
    assert with_experts - ModelFlops.of(model).body == 2 * stacked * 2 / 4


EXAMPLES = [{"input_ids": list(range(1, n)), "labels": [-100] * 2 + list(range(3, n))} for n in (5, 31, 9)]


@pytest.mark.parametrize("collate", [
    DataCollatorForPacking(), DataCollatorForPacking(pad_to_multiple_of=64), DataCollatorForLanguageModeling(0),
])  # fmt: skip
def test_mfu_is_the_needed_arithmetic_over_the_peak(collate):
    """Packed, packed with a trailing pad, padded: the same documents need the same; pads need nothing."""
    model = tiny.model(layers=2)
    args = PackedSFTConfig("out", use_cpu=True, bf16=False, peak_tflops=2e-6)
    meter = SpeedMeter(model, args, world_size=2)
    meter.start(1000)
    meter.add(collate(EXAMPLES))
    figures = meter.read(1000 + 2 * 42, seconds=4.0, shared=0)
    assert figures["tokens_per_second"] == 2 * 42 / 4
    trained, seen = (42 - 2 * 3) / 42, (4**2 + 30**2 + 8**2) / 42
    needed = ModelFlops.of(model).per_token(seen=seen, trained=trained)
    assert figures["mfu"] == pytest.approx(2 * 42 / 4 * needed / (2 * 2e6))
    assert meter.read(1000 + 2 * 42, seconds=1.0, shared=0) == {}, "nothing trained since"


def test_the_machine_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr("trl_packfa.trainers.sft.throughput.peak_flops", lambda *a, **k: measured.append(1) or 1e9)
    trainer = packed_trainer(arguments())
    trainer.train()
    assert len(measured) == 1 and all(0 < entry["mfu"] for entry in logs_of(trainer))


def test_evaluations_and_checkpoints_are_no_training_time(tmp_path, monkeypatch):
    """A clock that only they move: with their time counted the speed would fall to next to nothing."""
    now = [0.0]
    for callback in ("clock", "sft.run_callback"):
        monkeypatch.setattr(f"trl_packfa.trainers.{callback}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    args = arguments(
        out=tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2,
        peak_tflops=1.0,
    )  # fmt: skip
    trainer = packed_trainer(args, eval_dataset={"a": dataset(4, seed=1), "b": dataset(4, seed=2)})

    slow_down(monkeypatch, SFTTrainer, now, training_step=2.0, evaluate=1000.0, _save_checkpoint=1000.0)
    trainer.evaluate()  # before there is any training whose time it could be
    trainer.train()
    logs = logs_of(trainer)
    counts = [entry["num_tokens"] for entry in logs]
    trained = [count - before for before, count in zip([0, *counts[:-1]], counts, strict=True)]
    assert [entry["tokens_per_second"] for entry in logs] == [tokens / 2.0 for tokens in trained]
    assert now[0] > 4 * 1000


def test_a_figure_that_cannot_be_counted_is_missing_and_said_once(caplog):
    @figure("figure of this test")
    def count(sizes):
        return sizes["width"]

    with caplog.at_level(logging.INFO, logger="trl_packfa"):
        assert (count({"width": 3}), count({}), count({})) == (3, None, None)
    assert caplog.text.count("trl-packfa: no figure of this test: KeyError: 'width'") == 1


def test_a_model_without_sizes_in_its_config_trains_without_mfu(tmp_path):
    """BLT is several models; its config has no `hidden_size`."""
    model = small_model("blt")
    assert ModelFlops.of(model) is None and quadratic_weight(model) == 0.0
    trainer = packed_trainer(arguments(out=tmp_path, max_steps=1, check_packing=False), model=model)
    trainer.train()
    (entry,) = logs_of(trainer)
    assert entry["tokens_per_second"] > 0 and "mfu" not in entry


def broken(*args, **kwargs):
    raise AttributeError("no such size")


FIGURES = [
    (flops, "attention_heads"), (throughput, "matmul_flops"), (throughput, "known_peak"), 
    (epoch_plan, "plan_epoch"), (trainer, "describe"), (packed_run, "packing_section"),
    (templates, "_some"),
]  # fmt: skip


@pytest.mark.parametrize("where", FIGURES, ids=lambda where: where[1])
def test_no_figure_ends_a_run(where, tmp_path, monkeypatch):
    monkeypatch.setattr(*where, broken)
    packed = packed_trainer(arguments(out=tmp_path, gradient_checkpointing=True))
    packed.train()
    packed.create_model_card()
    assert len(logs_of(packed)) == 3 and (tmp_path / "README.md").exists()


def test_batches_of_another_kind_are_not_counted_and_train(tmp_path):
    meter = SpeedMeter(tiny.model(layers=1), PackedSFTConfig("out", use_cpu=True, bf16=False), world_size=1)
    meter.start(0)
    meter.add({"input_ids": torch.ones(1, 4, dtype=torch.long)})  # no labels: a model with a loss of its own
    assert meter.read(4, seconds=1.0, shared=0) == {}


def test_advice_that_fails_hides_no_error():
    args = PackedSFTConfig("out", use_cpu=True, bf16=False)
    with pytest.raises(MemoryError, match="full"), throughput.memory_advice(args, {}, budget=None):
        raise MemoryError("full")


class Counting(TrainingClock):
    documents = 0

    def _counts(self):
        return np.append(super()._counts(), self.documents)


@pytest.fixture
def run(monkeypatch):
    """A run whose time and documents move by the test's own hand."""
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    counting = Counting()

    def spend(seconds, documents=0):
        now[0] += seconds
        counting.documents += documents

    return counting, spend


def test_what_comes_after_a_step_does_not_count(run):
    counting, spend = run
    spend(50, 5)
    assert counting.take().tolist() == [0, 0], "before training"
    counting.on_train_begin()
    for event in (counting.on_evaluate, counting.on_save, counting.on_log, counting.on_predict):
        spend(2, 3)
        counting.on_step_end()
        spend(1000, 7)
        event()
    assert counting.take().tolist() == [8, 12]


def test_a_log_counts_the_wait_for_the_device_before_it(run):
    counting, spend = run
    counting.on_train_begin()
    spend(2, 1)
    counting.on_step_end()
    spend(3)  # the host waits for the loss
    assert counting.take().tolist() == [5, 1]
    counting.on_log()
    with counting.paused():
        spend(60, 9)
    spend(1, 1)
    assert counting.take().tolist() == [1, 1] and counting.whole.tolist() == [6, 2]
    counting.on_train_begin()
    assert counting.take().tolist() == [0, 0], "of the next run"


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H200", 989),
    ("NVIDIA H200 NVL", 835),
    ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA A100-PCIE-40GB", 312),
    ("NVIDIA L4", 121),
    ("NVIDIA L40S", 362),
    ("AMD Instinct MI300X", 1307.4),
    ("NVIDIA L40", None),
    ("NVIDIA GH200 480GB", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("NVIDIA GeForce RTX 4090", None),
])  # fmt: skip
def test_devices_are_known_by_their_names(name, tflops):
    assert named_flops(name) == (None if tflops is None else tflops * 1e12)


def test_only_half_precision_on_cuda_has_a_data_sheet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda", 0)
    assert datasheet_flops(gpu, torch.bfloat16) == datasheet_flops(gpu, torch.float16) == 989e12
    assert datasheet_flops(gpu, torch.float32) is None
    assert datasheet_flops(torch.device("cpu"), torch.bfloat16) is None


def test_calls_are_timed_with_the_threads_of_the_run():
    threads, calls = torch.get_num_threads(), []
    assert flops.best_seconds(lambda: calls.append(torch.get_num_threads()), seconds=1e-4) > 0
    assert set(calls) == {threads}


@pytest.mark.parametrize(("device", "rows"), [("cpu", 2048), ("cuda", 8192)])
def test_a_gpu_is_given_as_many_rows_as_fill_it(device, rows, monkeypatch):
    asked = []
    monkeypatch.setattr(throughput, "matmul_flops", lambda *shape, **options: asked.append(shape) or 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=64, intermediate_size=[128, 256]))
    args = SimpleNamespace(peak_tflops=None, device=torch.device(device), bf16=True, fp16=False)
    throughput.peak_flops(config, args)
    assert asked == [(rows, 64, 256)]


@pytest.mark.parametrize(("name", "estimated"), [("gemma4_text", True), ("blt", False)])
def test_widths_that_differ_from_layer_to_layer_or_are_not_said(name, estimated):
    model = small_model(name)
    assert (memory.shape_of(model, arguments()) is not None) == estimated, "which `plan` leaves out"
    if estimated:
        text = model.config.get_text_config()
        widths = [text.per_layer_config[layer].head_dim for layer in range(text.num_hidden_layers)]
        assert len(set(widths)) > 1 and attention_heads(text)[1] == round(sum(widths) / len(widths))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused LoRA"])
def test_a_layer_keeps_what_is_estimated(fused, monkeypatch):
    """On a wide layer, where what grows with the number of heads and with the rotation does not matter. Fused, its
    norms keep their inputs, its MLP gate and up. One document, which attention copies nothing of."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    kept, ids = {}, torch.arange(64) % 90
    for layers in (1, 3):
        model = tiny.model(layers=layers, attention_bias=False, **sizes).train()
        forward = partial(model.model, input_ids=ids[None])
        if fused:
            pretend_liger(monkeypatch)
            model = patch(get_peft_model(model, lora_config()).train())
            forward = partial(model, **tiny.batch([ids]))
        kept[layers] = kept_bytes(model, forward)
    shape = memory.shape_of(tiny.model(layers=1, attention_bias=False, **sizes), arguments())
    measured = (kept[3] - kept[1]) / 2 / len(ids)
    assert_estimate(memory.layer_bytes(shape, 4, fused_mlp=fused, fused_norms=fused), measured)
    assert not fused or memory.layer_bytes(shape, 4) > 1.3 * measured, "control: without"


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"lora_dropout": 0.0}, True), ({"fused_kernels": False}, False),
     ({"lora_target_modules": ["q_proj"]}, False)],
)  # fmt: skip
def test_whose_mlps_are_fused(options, fused, tmp_path):
    assert memory.fuses_mlps(PackedSFTConfig(str(tmp_path), use_cpu=True, **options)) == fused


def test_the_table_of_memory_is_that_of_the_estimate():
    page = (Path(__file__).parents[2] / "docs" / "getting_started.md").read_text(encoding="utf-8")
    block = page.split("<!-- generated: python tools/memory_table.py -->\n")[1].split("\n<!-- end -->")[0]
    assert block == memory_table.table()
