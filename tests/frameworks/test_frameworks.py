"""The hooks of other trainers, each called as its framework calls it: stand-ins of their interfaces, no framework."""

import importlib.util
import logging
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from oracle import nll
from tiny import LENGTHS, documents
from tiny_models import small_model
from tolerance import assert_another_run, assert_recomputed, assert_trajectory, differs
from training import trained
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import trl_packfa
from trl_packfa.errors import ContaminationError, InvalidConfig, UnsupportedModel, VersionTooOld
from trl_packfa.frameworks import llama_factory_plugin
from trl_packfa.frameworks.axolotl_plugin import PackfaPlugin
from trl_packfa.frameworks.packing import packed_row
from trl_packfa.frameworks.plain_trainer import PackfaCallback

FILE = Path(trl_packfa.__file__).parent / "frameworks" / "ms_swift_plugin.py"


def examples(**columns):
    return [{"input_ids": ids.tolist(), "labels": ids.tolist(), **columns} for ids in documents()]


def loss_alone(model):
    """The mean loss of every token but the documents' first, from documents alone."""
    losses = [nll(model(input_ids=ids[None], use_cache=False).logits[0], ids) for ids in documents()]
    return torch.stack(losses).sum() / (sum(LENGTHS) - len(LENGTHS))


def assert_packs(model, batch):
    with torch.no_grad():
        assert_recomputed(model(**batch, use_cache=False).loss, loss_alone(small_model("gemma2")))
        without = {name: batch[name] for name in ("input_ids", "labels")}
        assert differs(model(**without, use_cache=False).loss, loss_alone(model))


class AxolotlsManager:
    """Calls plugins as Axolotl 0.19 does: a class by its dotted path, every hook on every plugin."""

    def __init__(self, path, cfg):
        module, _, name = path.rpartition(".")
        self.plugin, self.cfg = getattr(importlib.import_module(module), name)(), cfg

    def load(self, model):
        plugin, cfg = self.plugin, self.cfg
        plugin.register(cfg)
        assert plugin.get_input_args() is None and plugin.get_training_args_mixin() is None
        assert [*plugin.get_adapter_capabilities()] == [] and not plugin.get_lora_config_kwargs(cfg)
        plugin.pre_model_load(cfg)
        for hook in (plugin.post_model_build, plugin.pre_lora_load, plugin.post_lora_load, plugin.post_model_load):
            hook(cfg, model)
        assert plugin.get_trainer_cls(cfg) is None and plugin.create_optimizer(cfg, None) is None
        assert not plugin.add_callbacks_pre_trainer(cfg, model)
        plugin.post_train(cfg, model)
        return plugin.get_collator_cls_and_kwargs(cfg, is_eval=False)


def test_axolotls_plugin_patches_and_checks_its_model():
    model = small_model("gemma2")
    config = {"attn_implementation": "sdpa", "sample_packing": True}
    manager = AxolotlsManager("trl_packfa.frameworks.axolotl_plugin.PackfaPlugin", config)
    collator, options = manager.load(model)
    tokenizer = SimpleNamespace(pad_token_id=0)
    rows = examples(attention_mask=[1], length=7)
    to_64 = collator(tokenizer, padding=True, return_tensors="pt", pad_to_multiple_of=64, **options)
    made = to_64([rows[:3], rows[3:]])
    assert made["input_ids"].shape == (1, 128) and "attention_mask" not in made and "cu_seq_lens_q" in made
    assert_packs(model, collator(tokenizer, **options)([rows]))
    assert PackfaPlugin().get_collator_cls_and_kwargs({"eval_sample_packing": False}, is_eval=True) is None
    with pytest.raises(InvalidConfig, match="needs sample_packing"):
        PackfaPlugin().register({"attn_implementation": "sdpa"})
    with pytest.raises(InvalidConfig, match="flash_attention_2"):
        PackfaPlugin().register({**config, "attn_implementation": "flash_attention_2"})


def load_by_path(monkeypatch, callbacks_map):
    """Import the file as ms-swift 4.6 imports an external plugin."""
    callbacks = ModuleType("swift.callbacks")
    if callbacks_map is not None:
        callbacks.callbacks_map = callbacks_map
    for module in (ModuleType("swift"), callbacks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("external", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class SwiftsTemplate:
    """A template that makes a row of a micro-batch once it is told to: positions, no mask."""

    def __init__(self, support_padding_free=None):
        self.padding_free, self.support_padding_free = False, support_padding_free

    def data_collator(self, batch):
        assert self.padding_free
        row = {
            "input_ids": [token for row in batch for token in row["input_ids"]],
            "labels": [label for row in batch for label in (-100, *row["labels"][1:])],
            "position_ids": [i for row in batch for i in range(len(row["input_ids"]))],
        }
        return {name: torch.tensor([values]) for name, values in row.items()}


def test_ms_swifts_plugin_patches_and_checks_its_model(monkeypatch):
    callbacks = {}
    load_by_path(monkeypatch, callbacks)
    trainer = SimpleNamespace(model=small_model("gemma2"), template=SwiftsTemplate())
    callback = callbacks["packfa"](None, trainer)
    callback.on_train_begin(None, None, None, model=trainer.model)
    assert_packs(trainer.model, trainer.template.data_collator(examples()))
    trainer.template = SwiftsTemplate(support_padding_free=False)
    with pytest.raises(InvalidConfig, match="SwiftsTemplate does not support padding-free rows"):
        callback.on_train_begin(None, None, None, model=trainer.model)
    with pytest.raises(VersionTooOld, match="needs ms-swift 4 or newer"):
        load_by_path(monkeypatch, None)


class LlamaFactorysPlugin:
    """A plugin of LLaMA-Factory v1 (0.9.5): functions by the names of a plugin and of a method."""

    registry = defaultdict(dict)

    def __init__(self, name):
        self.name = name

    def register(self, method="__call__"):
        return lambda function: self.registry[self.name].setdefault(method, function)

    def __getattr__(self, method):
        return self.registry[self.name][method]

    def __call__(self, *args, **kwargs):
        return self.registry[self.name]["__call__"](*args, **kwargs)


def test_llama_factorys_plugin_patches_and_checks_its_model(monkeypatch):
    with pytest.raises(VersionTooOld, match=r"needs LLaMA-Factory 0.9.5 or newer"):
        llama_factory_plugin.register()
    places = {"plugins.model_plugins.kernels.interface": "KernelPlugin", "plugins.trainer_plugins.batching":
              "BatchingPlugin"}  # fmt: skip
    for place, name in places.items():
        module = ModuleType(f"llamafactory.v1.{place}")
        setattr(module, name, LlamaFactorysPlugin)
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    llama_factory_plugin.register()
    model = LlamaFactorysPlugin("packfa")(model=small_model("gemma2"), include_kernels=None)
    info = {"micro_batch_size": 5, "num_micro_batch": 2, "cutoff_len": 64}
    samples = [{**row, "loss_weights": [1.0] * len(row["input_ids"])} for row in examples()]
    strategy, waiting = LlamaFactorysPlugin("packfa"), [samples, samples, None]

    class Buffer(list):
        def put(self, found):
            self.extend(found)

        def get(self, count):
            taken, self[:] = self[:count], self[count:]
            return taken

    buffer = Buffer()
    assert strategy.get_data_provider_batch_size(info) == 10 and strategy.compute_length([1, 2], info) == 2
    strategy.fill_buffer(buffer, info, lambda single: waiting.pop(0))
    batch = strategy.generate_batch(buffer, info)
    assert len(batch) == 2 and strategy.generate_batch(buffer, info) is None
    assert batch[0]["loss_weights"].sum() == sum(LENGTHS) - len(LENGTHS)
    # As LLaMA-Factory's trainer calls the model: every tensor, weights too, in training mode.
    tensors = {name: value for name, value in batch[0].items() if isinstance(value, torch.Tensor)}
    assert_packs(model, tensors)
    cut = llama_factory_plugin.generate_batch(Buffer(samples * 2), {**info, "cutoff_len": 7})
    assert cut[0]["cu_seq_lens_q"].tolist() == [0, 7, 8, 15, 22, 29]


def train(tmp_path, model, collator, **options):
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=5, max_steps=6, logging_steps=1, learning_rate=1e-3, seed=0,
        report_to=[], save_strategy="no", use_cpu=True, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for seed in range(6) for ids in documents(seed=seed)]
    trainer = trained(Trainer(model, args, data_collator=collator, train_dataset=rows, **options))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_plain_trainer(tmp_path, caplog):
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    with caplog.at_level(logging.INFO, "trl_packfa"):
        ours = train(tmp_path, small_model("gemma2"), flatten, callbacks=[PackfaCallback()])
    assert "exact" in caplog.text
    padded = train(tmp_path, small_model("gemma2", attn_implementation="eager"), DataCollatorForLanguageModeling(0))
    assert_trajectory(ours, padded)
    leaking = train(tmp_path, small_model("gemma2", attn_implementation="eager"), lambda rows: {
        name: value for name, value in flatten(rows).items() if name in ("input_ids", "labels")})  # fmt: skip
    assert_another_run(leaking, padded)


def test_the_plain_trainers_callback_keeps_the_options_of_a_patched_model(tmp_path):
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    model = trl_packfa.patch(small_model("mamba", num_hidden_layers=1), backend="reference")
    train(tmp_path, model, flatten, callbacks=[PackfaCallback()])
    assert "backend asked for: reference" in trl_packfa.describe(model)


def test_models_that_no_hook_may_train(tmp_path):
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    with pytest.raises(UnsupportedModel, match="sorts the row's tokens"):
        train(tmp_path, small_model("reformer"), flatten, callbacks=[PackfaCallback()])
    model = small_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ContaminationError):
        train(tmp_path, model, flatten, callbacks=[PackfaCallback()])


def test_rows_hold_what_every_trainer_moves():
    row = packed_row(examples(text="left out"), pad_to_multiple_of=16)
    assert set(row) == {
        "input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    }  # fmt: skip
    assert all(isinstance(value, (torch.Tensor, int)) for value in row.values())
