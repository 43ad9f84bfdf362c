"""What a GPU would compile, compiled for it without one: every kind of attention that `flex` serves, and a backbone
with FlashAttention inside. Skipped where torch has no CUDA build; `benchmarks/gpu/README.md` has the command."""

from functools import partial

import pytest
import rehearsal
import tiny
import torch
from packaging.version import Version
from peft import get_peft_model
from pretended import on_any_device
from rehearsal import SHARED_MEMORY, rehearse
from training import lora_config

from trl_packfa import PackedLayout, patch
from trl_packfa.attention import AttentionArguments, AttentionRequest, get_backend, varlen
from trl_packfa.attention import flex as flex_module
from trl_packfa.checking.documents import LONG, SHORT

pytestmark = [
    pytest.mark.gpu_rehearsal,
    pytest.mark.skipif(rehearsal.unavailable() is not None, reason=rehearsal.unavailable() or ""),
]
PROBE = tuple(LONG[i] for i in SHORT)  # fewer than 128 tokens
ROW = (300, 20)
BF16, FP32 = torch.bfloat16, torch.float32
# name: document lengths, query heads, key/value heads, head dim, value dim, dtype, arguments
CASES = {
    "heads of 64": (ROW, 4, 2, 64, 64, BF16, {}),
    "a short row": (PROBE, 4, 2, 64, 64, BF16, {}),
    "a short row, no GQA": (PROBE, 4, 4, 64, 64, BF16, {}),
    "one token": ((1,), 4, 2, 64, 64, BF16, {}),
    "window": (ROW, 4, 2, 64, 64, BF16, {"sliding_window": 64}),
    "softcap": (ROW, 4, 2, 64, 64, BF16, {"softcap": 30.0}),
    "softcap, a short row": (PROBE, 4, 2, 64, 64, BF16, {"softcap": 30.0}),
    "softcap, window, heads of 256": (ROW, 8, 4, 256, 256, BF16, {"softcap": 50.0, "sliding_window": 64}),
    "sinks": (ROW, 4, 2, 64, 64, BF16, {"sinks": True}),
    "sinks, window, a short row": (PROBE, 4, 2, 64, 64, BF16, {"sinks": True, "sliding_window": 64}),
    "heads of 80": (ROW, 4, 2, 80, 80, BF16, {}),
    "heads of 128": (ROW, 8, 2, 128, 128, BF16, {}),
    "heads of 256": (ROW, 4, 2, 256, 256, BF16, {}),
    "MLA, 192 and 128": (ROW, 4, 4, 192, 128, BF16, {}),
    "float32": (ROW, 4, 2, 64, 64, FP32, {}),
    "float32, heads of 128": (ROW, 4, 2, 128, 128, FP32, {}),
    "float32, heads of 256": (ROW, 4, 2, 256, 256, FP32, {}),
}


@pytest.fixture(scope="module", autouse=True)
def _h100():
    with pytest.MonkeyPatch.context() as patch, rehearsal.installed(patch):
        yield


def attend(lengths, heads, kv_heads, dim, value_dim, dtype, options, *, backward):
    """What the backend compiles for such a call, its own code all around."""
    layout = PackedLayout.from_lengths(lengths)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    qkv = [torch.randn(layout.num_tokens, *shape, dtype=dtype, requires_grad=backward) for shape in shapes]
    sinks = torch.randn(heads) if options.get("sinks") else None
    arguments = AttentionArguments(scaling=0.2, **{**options, "sinks": sinks})

    def call(backend):
        flex_module._compiled.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
            # On a CPU the backend leaves the function uncompiled.
            patch.setattr(flex_module, "flex_attention", flex_module._compiled())
            get_backend("flex")(*qkv, arguments.on(layout.attention)).float().square().mean().backward()

    return rehearse(call, backward=backward)


@pytest.mark.parametrize("backward", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("case", CASES)
def test_flex_compiles_for_an_h100(case, backward):
    found = attend(*CASES[case], backward=backward)
    largest = max(found.kernels, key=lambda kernel: kernel.shared)
    assert all(kernel.cubin for kernel in found.kernels) and largest.shared <= SHARED_MEMORY
    print(f"{case}: {len(found.kernels)} kernels, {largest.shared / 1024:.0f} KiB of shared memory")


@pytest.mark.parametrize(("undo", "case", "backward", "said"), [
    # torch 2.14 says what it lacks, and lacks it as before. torch 2.15 lacks it no more.
    ("kernel_options", "a short row", True, "NoValidChoices|Invalid FlexAttention decode kernel options"),
    ("specialize_float", "softcap", False, "unbacked|with fake tensors"),
])  # fmt: skip
def test_the_control_does_not(undo, case, backward, said, monkeypatch):
    """What torch does where the backend leaves its choice to it."""
    if undo == "kernel_options":
        if Version(torch.__version__) >= Version("2.15"):
            pytest.skip("torch 2.15 has a backward for short rows")
        monkeypatch.setattr(flex_module, "_KERNEL_OPTIONS", {})
    else:
        monkeypatch.setattr(flex_module, "_SETTINGS", {})
    with pytest.raises(RuntimeError, match=said):
        attend(*CASES[case], backward=backward)


@pytest.mark.parametrize(("dim", "dtype"), [(512, BF16), (64, torch.float64)], ids=["heads of 512", "float64"])
def test_what_flex_refuses_would_not_compile(dim, dtype):
    request = AttentionRequest(torch.device("cuda"), dtype, dim, 4, 2)
    assert get_backend("flex").capabilities._of_shape(request)
    try:
        found = attend(ROW, 4, 2, dim, dim, dtype, {}, backward=True)
    except RuntimeError:
        return
    assert max(kernel.shared for kernel in found.kernels) > SHARED_MEMORY


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_a_backbone_compiles_whole_with_flash_attention_inside(architecture, lora, monkeypatch):
    on_any_device(monkeypatch, varlen.VarlenBackend)
    model = tiny.model(architecture, layers=2).to(BF16).train()
    model = patch(get_peft_model(model, lora_config()).train() if lora else model, backend="varlen")
    batch = tiny.batch(tiny.documents())
    found = rehearse(lambda backend: torch.compile(model, backend=backend)(**batch), backward=True)
    print(f"{architecture}, {'LoRA' if lora else 'full'}: {found.passes}, {len(found.kernels)} kernels")
    assert found.passes[:2] == ["forward", "backward"] and all(kernel.cubin for kernel in found.kernels)
