"""Models whose layers lie on several devices (`device_map`): CPU and meta stand for two GPUs."""

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from tiny_models import small_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trl_packfa
from trl_packfa.attention import BackendChoice
from trl_packfa.layout import PackedLayout
from trl_packfa.patching import by_name

LENGTHS = [3, 40, 5]


@pytest.fixture
def devices(monkeypatch):
    """The devices of query and layout in each call of a backend."""
    is_enabled, attend, seen = torch.is_autocast_enabled, BackendChoice.attend, []

    def watched(self, query, key, value, layout, arguments):
        seen.append((query.device.type, layout.cu_seqlens.device.type))
        return attend(self, query, key, value, layout, arguments)

    monkeypatch.setattr(BackendChoice, "attend", watched)
    # Autocast does not know the meta device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": device != "meta" and is_enabled(device))
    return seen


class OneDevice(TorchDispatchMode):
    """Refuses operators on tensors of two devices, as CUDA does; the meta device does not refuse all of them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()}
        # PEFT's activated LoRA indexes by a mask on the CPU, and CUDA accepts that.
        by_index = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
        masks = by_index and any(x is not None and x.dtype == torch.bool for x in args[1])
        if len(found) > 1 and "copy" not in str(func) and not masks:
            raise RuntimeError(f"{func} on {sorted(found)}")
        return func(*args, **(kwargs or {}))


def split(model):
    """Put the later half of a model's layers, and what comes after them, on the meta device."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    name = next(name for name, module in model.named_modules() if module is layers)
    places = {f"{name}.{i}": "cpu" if i < len(layers) // 2 else "meta" for i in range(len(layers))}
    beside = [n for n, _ in model.named_modules() if n and not n.startswith(name) and not name.startswith(n)]
    places |= {n: "meta" if "norm" in n or "ln_f" in n or "head" in n else "cpu" for n in beside}
    return dispatch_model(model, places, main_device="cpu", force_hooks=True)


def run(model):
    """Run a packed call, and return the hidden states."""
    torch.manual_seed(0)
    ids, layout = torch.randint(0, 60, (1, sum(LENGTHS))), PackedLayout.from_lengths(LENGTHS)
    with OneDevice():
        return model.base_model(input_ids=ids, packed_layout=layout)[0]


BY_DOCUMENT = ("mamba", "openai-gpt")  # which attend by no backend, or each document alone


@pytest.mark.parametrize("model_type", ["llama", "smollm3", "gptj", "mpt", "doge", "jamba", *BY_DOCUMENT])
def test_split_model_gives_each_layer_a_layout_on_its_device(devices, model_type):
    options = {} if model_type in BY_DOCUMENT else {"backend": "sdpa"}
    states = run(split(trl_packfa.patch(small_model(model_type).eval(), **options)))
    assert states.device.type == "meta" and states.shape[:2] == (1, sum(LENGTHS))
    if model_type not in BY_DOCUMENT:
        assert set(devices) == {("cpu", "cpu"), ("meta", "meta")}


def test_split_model_runs_padded_rows_without_pads(devices):
    model = split(trl_packfa.patch(small_model("llama").eval(), backend="sdpa", unpad=True))
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, 20:] = 0
    with OneDevice():
        states = model.base_model(input_ids=torch.zeros(2, 24, dtype=torch.long), attention_mask=mask)[0]
    assert states.shape[:2] == (2, 24) and states.device.type == "meta"
    assert set(devices) == {("cpu", "cpu"), ("meta", "meta")}


def test_split_model_by_name_finds_the_layout_on_each_device():
    layout = PackedLayout.from_lengths(LENGTHS)
    heads = [(torch.empty(1, 2, sum(LENGTHS), 4, device=device),) * 3 for device in ("cpu", "meta")]
    found = [by_name._layout_of(own, None, {"packed_layout": layout}) for own in heads]
    assert [one.cu_seqlens.device.type for one in found] == ["cpu", "meta"]


def test_activated_lora_selects_tokens_on_the_layers_device(devices):
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[7, 8])
    model = get_peft_model(small_model("llama"), config).eval()
    model = split(trl_packfa.patch(model, backend="sdpa"))
    ids = torch.randint(0, 60, (1, sum(LENGTHS)))
    ids[0, 4:6] = torch.tensor([7, 8])
    with OneDevice():
        states = model.base_model.model.model(input_ids=ids, packed_layout=PackedLayout.from_lengths(LENGTHS))[0]
    assert states.device.type == "meta"
