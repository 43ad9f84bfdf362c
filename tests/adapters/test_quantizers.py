"""Which quantizers let documents of a batch change each other: measured for bitsandbytes, else read."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch

pytest.importorskip("bitsandbytes")
from bitsandbytes.nn import Linear8bitLt
from calls import watched
from peft import LoraConfig, get_peft_model
from tolerance import assert_float32, differs
from training import arguments, packed_trainer, padded_trainer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationMethod
from trl import SFTConfig

from trl_packfa import candidates, check, padding_free, patch
from trl_packfa.adapters import verdicts
from trl_packfa.adapters.quantizers import QUANTIZERS, quantizer_of, refuse_quantization, refuse_quantized
from trl_packfa.errors import ContaminationError, InvalidConfig, UnsupportedModel
from trl_packfa.patches.registry import get_patch
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target

INT8 = BitsAndBytesConfig(load_in_8bit=True)
INT8_WITHOUT_OUTLIERS = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


@pytest.fixture
def saved(tmp_path):
    """A model one of whose features is an outlier in some documents, as trained models have."""
    model = tiny.model(layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[::9, 3] *= 30
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def loaded(saved, quantization):
    base = AutoModelForCausalLM.from_pretrained(saved, quantization_config=quantization, dtype=torch.float32)
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))


@torch.no_grad()
def logits(model):
    """Packed and alone, as evaluation computes them."""
    docs = tiny.documents()
    alone = torch.cat([model(input_ids=ids[None]).logits[0] for ids in docs])
    apply_patch(Target.of(model), get_patch(model.config))
    return model(**tiny.batch(docs)).logits[0], alone


def test_int8_is_exact_without_a_threshold_and_only_then(saved):
    assert_float32(*logits(loaded(saved, INT8_WITHOUT_OUTLIERS).eval()))
    assert differs(*logits(loaded(saved, INT8).eval()))  # the control


def test_int8_with_a_threshold_is_refused_by_name(saved):
    model = loaded(saved, INT8)
    with pytest.raises(UnsupportedModel, match=r"bitsandbytes(.|\n)*outlier(.|\n)*llm_int8_threshold=0\.0"):
        patch(model)
    by_config = arguments(model_init_kwargs={"quantization_config": INT8})
    by_argument = {"model": saved, "quantization_config": INT8}
    for args, given in ((None, {"model": model, "peft_config": None}), (None, by_argument),
                        (by_config, {"model": saved})):  # fmt: skip
        with pytest.raises(UnsupportedModel, match="llm_int8_threshold"):
            packed_trainer(args, **given)
    patch(loaded(saved, INT8_WITHOUT_OUTLIERS))


def test_load_in_8bit_leaves_the_threshold_out_and_says_so(saved, caplog):
    trainer = packed_trainer(arguments(load_in_8bit=True), model=saved, peft_config=None)
    assert trainer.model.config.quantization_config.llm_int8_threshold == 0.0
    assert "llm_int8_threshold=0.0, not bitsandbytes' 6.0" in caplog.text
    padded = packed_trainer(arguments(load_in_8bit=True, packing=False), model=saved, peft_config=None)
    assert padded.model.config.quantization_config.llm_int8_threshold == 6.0


def test_every_quantizer_of_transformers_is_in_the_table():
    assert {method.value for method in QuantizationMethod} | set(AUTO_QUANTIZER_MAPPING) == set(QUANTIZERS)


def torchao(name, *granularity):
    """A config as torchao's, whose scales are of each tensor or of each row."""
    scales = tuple(type(scale, (), {})() for scale in granularity)
    attributes = {"granularity": scales if len(scales) > 1 else scales[0]} if scales else {}
    return {"quant_method": "torchao", "quant_type": type(name, (), attributes)()}


def compressed(**activations):
    groups = {"group_0": {"weights": {"num_bits": 8}, "input_activations": activations or None}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(("config", "verdict"), [
    ({"quant_method": "gptq", "bits": 4}, "exact"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "exact"),
    ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "refused"),
    (torchao("Int8WeightOnlyConfig"), "exact"),
    (torchao("Int8DynamicActivationInt8WeightConfig"), "exact"),
    (torchao("Int8DynamicActivationInt8WeightConfig", "PerTensor", "PerRow"), "refused"),
    (torchao("Float8DynamicActivationFloat8WeightConfig"), "refused"),
    (torchao("Float8DynamicActivationFloat8WeightConfig", "PerRow"), "exact"),
    (torchao("SomethingNewConfig"), "unknown"),
    (compressed(), "exact"),
    (compressed(dynamic=True, strategy="token"), "exact"),
    (compressed(dynamic=True, strategy="tensor"), "refused"),
    (compressed(dynamic=False, strategy="tensor"), "exact"),
    (compressed(dynamic="local", strategy="tensor_group"), "unknown"),
    ({"quant_method": "brand_new"}, "unknown"),
])  # fmt: skip
def test_what_depends_on_the_config(config, verdict):
    for given in (config, SimpleNamespace(**config)):
        assert quantizer_of(given)[1].verdict == verdict
    if verdict == "refused":
        with pytest.raises(UnsupportedModel, match="packing=False"):
            refuse_quantization(config)
    else:
        refuse_quantization(config)


def test_a_quantizer_that_nobody_has_read_is_checked_on_the_model(monkeypatch):
    checked, other = watched(monkeypatch, candidates, "check"), tiny.model(layers=1)
    patch(tiny.model(layers=1))
    assert not checked
    other.config.quantization_config = {"quant_method": "brand_new"}
    patch(other)
    assert checked == [(other,)]


def int8_layer(layer, threshold):
    return Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False, threshold=threshold)


def float8_layer(layer, granularity):
    """A stand-in for torchao's layer of this name."""
    made = type("Float8Linear", (torch.nn.Linear,), {})(layer.in_features, layer.out_features, bias=False)
    scaling = SimpleNamespace(scaling_granularity=SimpleNamespace(name=granularity))
    made.config = SimpleNamespace(cast_config_input=scaling)
    return made


@pytest.mark.parametrize(("make", "refused", "exact", "said"), [
    (int8_layer, 6.0, 0.0, r"layers.0.mlp.up_proj' .* a threshold of 6.0"),
    (float8_layer, "TENSORWISE", "AXISWISE", r"up_proj' is torchao's Float8Linear(.|\n)*'rowwise'"),
])  # fmt: skip
def test_layers_that_were_put_in_by_hand_are_looked_at(make, refused, exact, said):
    """No config tells of them."""
    model = tiny.model(layers=1)
    mlp, layer = model.model.layers[0].mlp, model.model.layers[0].mlp.up_proj
    mlp.up_proj = make(layer, exact)
    refuse_quantized(model)
    mlp.up_proj = make(layer, refused)
    with pytest.raises(UnsupportedModel, match=said):
        refuse_quantized(model)


def test_torchaos_float8_is_exact_by_token_and_leaks_with_one_scale_for_a_tensor(monkeypatch):
    float8 = pytest.importorskip("torchao.float8")

    def converted(recipe):
        config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        model = tiny.model(layers=2)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "layers" in name)
        return model

    assert check(patch(converted("rowwise"))).is_exact
    with pytest.raises(UnsupportedModel, match="one scale for each tensor"):
        patch(converted("tensorwise"))
    monkeypatch.setattr(verdicts, "refuse_quantized", lambda model: None)
    with pytest.raises(ContaminationError, match="replacing some documents changed others"):  # the control
        patch(converted("tensorwise"))


def test_fp8_of_accelerate_is_refused_because_it_converts_layers_after_the_check(tmp_path, monkeypatch):
    said = r"mixed_precision='fp8'(.|\n)*after the check(.|\n)*'rowwise'"
    trainer = padded_trainer(arguments(SFTConfig, tmp_path))
    trainer.args.mixed_precision = "fp8"  # as of a launch with fp8, which needs torchao
    with pytest.raises(InvalidConfig, match=said):
        padding_free(trainer)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(InvalidConfig, match=said):
        packed_trainer(arguments(out=tmp_path))
