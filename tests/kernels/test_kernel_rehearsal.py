"""Liger's Triton kernels, as they are called here, and our own, compiled for an H100 where there is none; nothing is
launched. Skipped where Triton or liger-kernel is missing."""

import pytest
import torch
from rehearsal import SHARED_MEMORY, compile_launches

pytestmark = pytest.mark.gpu_rehearsal
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF_AND_FULL = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
# An H100's, an A100's and a B200's.
ARCHES = pytest.mark.parametrize("arch", [90, 80, 100], ids=lambda arch: f"sm_{arch}")


@pytest.fixture
def compiled(monkeypatch, arch):
    pytest.importorskip("triton")
    return compile_launches(monkeypatch, arch)


@pytest.fixture
def liger(monkeypatch):
    """The real one, for which a CPU is the device."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    from trl_packfa.kernels import liger

    kernels = liger.liger_kernels()
    assert kernels is not None, liger.liger_unavailable()
    monkeypatch.setattr(liger, "lies_on_cuda", lambda tensor: True)
    return kernels


def names(compiled):
    assert all(kernel.cubin > 0 and kernel.shared <= SHARED_MEMORY for kernel in compiled)
    return {kernel.name for kernel in compiled}


# Llama 3 8B's, a head's of Qwen3 (many short rows take other kernels), Llama 3 405B's.
@pytest.mark.parametrize("shape", [(1, 9, 4096), (1, 4096, 8, 128), (1, 3, 16384)], ids=str)
@HALF_AND_FULL
@ARCHES
def test_ligers_norm_compiles(shape, dtype, liger, compiled):
    from trl_packfa.kernels.liger import norm_by_liger, takes

    x, weight = torch.zeros(shape, dtype=dtype, requires_grad=True), torch.ones(shape[-1], dtype=dtype)
    assert takes(x, weight)
    norm_by_liger(liger, 1e-6, x, weight.requires_grad_(shape[1] == 9))[0].sum().backward()
    forward, backward = ("_block", "_block") if shape[-1] <= 256 else ("", "_fused_add")
    assert names(compiled) == {f"{forward}_rms_norm_forward_kernel", f"{backward}_rms_norm_backward_kernel"}


# Grouped heads, a part of the head (Phi), and each row's own tables.
@pytest.mark.parametrize(("heads", "width", "rotated", "rows"), [((32, 8), 128, 128, 1), ((32, 32), 80, 32, 1),
                                                                 ((14, 2), 64, 64, 2)])  # fmt: skip
@HALF_AND_FULL
@ARCHES
def test_ligers_rotation_compiles(heads, width, rotated, rows, dtype, liger, compiled):
    from trl_packfa.kernels.liger import rotate_by_liger

    query, key = (torch.zeros(rows, 9, n, width, dtype=dtype, requires_grad=True) for n in heads)
    cos, sin = torch.zeros(2, rows, 9, rotated, dtype=dtype)
    outs = rotate_by_liger(liger, query, key, cos, sin, overwrites=False)
    sum(out.sum() for out in outs).backward()
    assert names(compiled) == {"_triton_rope"} and len(compiled) == 2


@pytest.mark.parametrize("features", [14336, 8192, 28672])
@HALF_AND_FULL
@ARCHES
def test_ligers_swiglu_compiles(features, dtype, arch, liger, compiled, monkeypatch):
    from trl_packfa.kernels.liger import _SwiGLU

    tiled = arch == 100 and features > 8192  # of wide rows Blackwell takes tiles
    monkeypatch.setattr("liger_kernel.ops.swiglu._should_tile", lambda n_cols: tiled)
    gate, up = (torch.zeros(1, 5, features, dtype=dtype, requires_grad=True) for _ in range(2))
    _SwiGLU.apply(gate, up).sum().backward()
    end = "_tiled" if tiled else ""
    assert names(compiled) == {f"_swiglu_forward_kernel{end}", f"_swiglu_backward_kernel{end}"}


# Llama 3's, an odd one, a tiny one.
@pytest.mark.parametrize("words", [128_256, 32_001, 40])
@pytest.mark.parametrize(("measures", "slopes"), [(True, True), (False, True), (True, False)])
@HALF_AND_FULL
@ARCHES
def test_lm_head(words, measures, slopes, dtype, compiled):
    from trl_packfa.kernels.lm_head.triton_kernel import score_rows

    logits, targets, scores = torch.zeros(3, words, dtype=dtype), torch.zeros(3).long(), torch.zeros(3, 3)
    score_rows(logits, targets, scores, measures=measures, slopes=slopes)
    assert names(compiled) == {"_score_row"} and len(compiled) == 1


@ARCHES
def test_a_kernel_that_does_not_compile_is_seen(compiled):
    """The control."""
    triton = pytest.importorskip("triton")

    @triton.jit
    def broken(pointer):
        triton.language.there_is_no_such_function(pointer)

    with pytest.raises(triton.CompilationError):
        broken[(1,)](torch.zeros(1))
    assert not compiled
