"""PEFT before and after the patch, 4-bit weights, device hooks."""

import copy
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import tiny
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from selection import exhaustive
from tiny_models import small_model
from tolerance import FORWARD_FACTOR, assert_float32, assert_low_precision
from training import arguments, packed_trainer

from trl_packfa import describe, patch, unpatch
from trl_packfa.checking import without_random_numbers
from trl_packfa.errors import UnsupportedModel
from trl_packfa.patches.registry import registered_patches
from trl_packfa.patching.bitsandbytes import SWITCH
from trl_packfa.trainers.loading import READ_DIRECTLY

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def alone(model, docs):
    with torch.no_grad():
        return torch.cat([model(input_ids=ids[None]).logits[0] for ids in docs])


def packed(model, docs):
    return model(**tiny.batch(docs)).logits[0]


@pytest.mark.parametrize("order", ["patch, then adapter", "adapter, then patch"])
@pytest.mark.parametrize("architecture", ["llama", "phi", "phi3"])
def test_lora_before_or_after_the_patch_equals_documents_alone(architecture, order):
    model, docs = tiny.model(architecture), tiny.documents()
    if order.startswith("patch"):
        patch(model)
    peft_model = get_peft_model(model, copy.deepcopy(LORA)).eval()
    patch(peft_model)
    assert_float32(packed(peft_model, docs), alone(peft_model, docs))
    packed(peft_model, docs).sum().backward()
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)


def test_adapters_switch_merge_and_unload_under_the_patch():
    docs = tiny.documents()
    model = patch(get_peft_model(tiny.model(), copy.deepcopy(LORA)).eval())
    model.add_adapter("second", copy.deepcopy(LORA))
    first = packed(model, docs)
    model.set_adapter("second")
    assert not torch.equal(packed(model, docs), first)
    assert_float32(packed(model, docs), alone(model, docs))
    merged = model.merge_and_unload()
    assert_float32(packed(merged, docs), alone(merged, docs))
    assert describe(unpatch(merged)) == "not patched"


def nf4_model(tmp_path):
    return get_peft_model(tiny.quantized(tmp_path, attention_bias=False), copy.deepcopy(LORA))


def gradients(model, docs):
    model.train().zero_grad()
    packed(model, docs).sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def test_nf4_weights_train_a_lora_adapter(tmp_path):
    model, docs = patch(nf4_model(tmp_path)), tiny.documents()
    assert type(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer).__name__ == "Linear4bit"
    assert_float32(packed(model.eval(), docs), alone(model, docs))
    assert all(grad.abs().sum() > 0 for grad in gradients(model, docs).values())


def test_evaluating_a_patched_nf4_model_leaves_its_gradients_right(tmp_path):
    """bitsandbytes would turn the weights into a layout without a backward: control and cure."""
    docs = tiny.documents()
    model = patch(nf4_model(tmp_path))
    before = gradients(model, docs)
    alone(model.eval(), docs)
    after = gradients(model, docs)
    assert all(torch.equal(grad, after[name]) for name, grad in before.items())
    unpatch(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16, bitsandbytes converts nothing")
    alone(model.eval(), docs)
    with pytest.raises(UnsupportedModel, match="inference-only CPU layout"):
        patch(model)


def test_measuring_an_nf4_model_before_it_is_patched_leaves_it_trainable(tmp_path):
    """The trainer compares heads first; found on a CPU with AVX512-BF16, which the switch plays here."""
    model = nf4_model(tmp_path)
    layers, converts = [module for module in model.modules() if hasattr(module, SWITCH)], []
    for layer in layers:
        setattr(layer, SWITCH, True)
        layer.register_forward_pre_hook(lambda module, _: converts.append(getattr(module, SWITCH)))
    with without_random_numbers(model), torch.no_grad():
        model(torch.arange(1, 9)[None])
    assert layers and converts == [False] * len(layers)
    assert all(getattr(layer, SWITCH) for layer in layers)


def test_bf16_adapter_on_bf16_weights():
    model, docs = patch(get_peft_model(tiny.model().bfloat16(), copy.deepcopy(LORA)).eval()), tiny.documents()
    ours, eager = packed(model, docs), alone(model, docs)
    reference = alone(model.double(), docs)
    assert_low_precision(ours, eager, reference, factor=FORWARD_FACTOR)


@pytest.mark.parametrize("order", ["patch, then hooks", "hooks, then patch"])
def test_device_map_hooks_are_kept(order):
    """A device_map moves the real forward to `_old_forward`; the patch must be behind the hook, not bypassed."""
    model, docs = tiny.model(layers=2), tiny.documents()
    expected = alone(model, docs)
    if order.startswith("patch"):
        patch(model)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "cpu" for i in range(2)}
    model = dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    patch(model)
    assert_float32(packed(model, docs), expected)
    if order.startswith("hooks"):
        unpatch(model)
        assert torch.equal(alone(model, docs), expected)


def weights_read_directly(model_type):
    """Linear layers of Mamba mixers whose weight a modelling file uses elsewhere than in its initialization."""
    source = Path(importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}").__file__)
    lines = [line for line in source.read_text().splitlines() if "init." not in line and "p = module" not in line]
    return {name for name in re.findall(r"self\.(out_proj|x_proj|dt_proj|in_proj)\.weight", "\n".join(lines))}


def test_layers_that_mamba_kernels_read_are_known():
    """`READ_DIRECTLY` against transformers' own code."""
    hybrids = [name for name in registered_patches() if importlib.util.find_spec(f"transformers.models.{name}")]
    mixers = {name: " ".join(registered_patches()[name].run_by_document).lower() for name in hybrids}
    found = {name: weights_read_directly(name) for name in hybrids if "mamba" in mixers[name]}
    assert {name: set(read) for name, read in READ_DIRECTLY.items()} == {n: read for n, read in found.items() if read}


@pytest.mark.parametrize(("model_type", "quantized"), [
    ("granitemoehybrid", False),
    ("mamba", True),
    *exhaustive(("granitemoehybrid", True), ("mamba", False), ("falcon_h1", False), ("falcon_h1", True)),
])  # fmt: skip
def test_all_linear_leaves_out_what_mamba_kernels_read(tmp_path, model_type, quantized):
    """PEFT refuses such a layer on some types, and trains it to no effect on others; the control has it."""
    if quantized:
        pytest.importorskip("bitsandbytes")
    small_model(model_type, intermediate_size=128).save_pretrained(tmp_path / "model")
    args = arguments(out=tmp_path, load_in_4bit=quantized, max_steps=1)
    trainer = packed_trainer(args, model=str(tmp_path / "model"), peft_config=None)
    trainer.train()
    modules = dict(trainer.model.named_modules())
    for name in READ_DIRECTLY[model_type]:
        layers = [module for path, module in modules.items() if path.endswith(f".{name}")]
        assert layers and all(type(layer) is torch.nn.Linear for layer in layers)
    adapted = {path.split(".lora_A")[0].split(".")[-1] for path in modules if path.endswith("lora_A.default")}
    assert adapted and not adapted & set(READ_DIRECTLY[model_type])
    if model_type == "granitemoehybrid":
        control = get_peft_model(small_model(model_type), LoraConfig(target_modules="all-linear"))
        assert any("out_proj.lora_A" in path for path, _ in control.named_modules())
