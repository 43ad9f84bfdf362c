"""Whole models on a GPU: every backend that runs there, and no waiting for the device. Skipped where there is none."""

import pytest
import tiny
import torch
from compiling import compile_anew
from peft import get_peft_model
from training import lora_config

from trl_packfa import check, describe, patch
from trl_packfa.attention import BACKENDS, AttentionRequest, get_backend
from trl_packfa.bench.tracing import compiled_graphs
from trl_packfa.errors import NoBackend

pytestmark = pytest.mark.gpu


def on_gpu(architecture, dtype, backend, *, lora=False, autocast=False):
    """A patched model on the GPU that has run once, or a skip with the backend's own reasons."""
    if not torch.cuda.is_available():
        request = AttentionRequest(torch.device("cpu"), torch.bfloat16 if autocast else dtype, 16, 4, 2)
        reasons = get_backend(backend).refusals(request) or ["runs on a CPU, where test_patches.py tries it"]
        pytest.skip(f"{backend}: {'; '.join(reasons)}")
    model = tiny.model(architecture).to("cuda", dtype)
    model = patch(get_peft_model(model, lora_config()).train() if lora else model, backend=backend)
    batch = batch_on_gpu(tiny.documents())
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            model(**batch)
    except NoBackend as refusal:
        pytest.skip(str(refusal))
    return model, batch


def batch_on_gpu(docs):
    return {k: v.to("cuda") if hasattr(v, "to") else v for k, v in tiny.batch(docs).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
@pytest.mark.parametrize("architecture", [name for name in tiny.ARCHITECTURES if name != "llama-dynamic"])
def test_every_backend_is_exact(architecture, backend, dtype):
    model, _ = on_gpu(architecture, dtype, backend)
    report = check(model)
    assert report.is_exact, str(report)


@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_fused_lora_is_exact_in_half_precision(backend):
    model, _ = on_gpu("llama", torch.bfloat16, backend, lora=True)
    assert "x LoRA: fused" in describe(model)
    report = check(model)
    assert report.is_exact, str(report)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("backend", ["flash", "varlen", "flex"])
def test_no_forward_waits_for_the_device(backend, lora):
    model, batch = on_gpu("llama", torch.bfloat16, backend, lora=lora)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).logits.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["flash", "varlen", "flex", "sdpa"])
def test_autocast_is_exact(backend):
    """TRL's default: float32 weights, whose rotated queries and keys are float32 too."""
    model, _ = on_gpu("llama", torch.float32, backend, autocast=True)
    with torch.autocast("cuda", torch.bfloat16):
        report = check(model)
    assert report.is_exact, str(report)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("backend", ["flash", "varlen", "flex"])
def test_a_backbone_is_compiled_once(backend, lora):
    model, _ = on_gpu("llama", torch.bfloat16, backend, lora=lora)
    compile_anew()
    compiled = torch.compile(model)
    for seed, lengths in enumerate(((13, 1, 29), (40,), (2, 30, 3, 3, 18, 5), (60, 5))):
        batch = batch_on_gpu(tiny.documents(lengths, seed=seed))
        compiled(**batch).logits.float().square().mean().backward()
    assert compiled_graphs() == 2, "backbone and head"
    report = check(compiled)
    assert report.is_exact, str(report)
