"""What the check does otherwise on a GPU: longer documents for kernels that work in tiles, and TF32's rounding. Both
are tried on a CPU by kernels that fail, or round, as a GPU's would."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from tiny_models import small_model
from torch import nn

from trl_packfa import PackedLayout, check, patch
from trl_packfa.attention.block_mask import BLOCK, block_mask
from trl_packfa.attention.sdpa import SdpaBackend
from trl_packfa.autocast import multiplies_in_tf32
from trl_packfa.checking import isolation, measure, rounding, subject
from trl_packfa.checking.documents import LONG, SHORT, long_lengths
from trl_packfa.checking.runs import Arrangement
from trl_packfa.comparison import TOLERANCES
from trl_packfa.errors import ContaminationError
from trl_packfa.patching.inspect import max_positions
from trl_packfa.patching.state import find_state

MODEL = {"layers": 2, "max_position_embeddings": 1024}


def test_documents_cross_tiles_where_kernels_work_in_them():
    """G13. Blocks of keys that a block of queries sees whole, in the row that has gradients of all documents."""
    tiled = long_lengths([], None, tiled=True)
    assert max(tiled) > 3 * BLOCK and len(tiled) == len(LONG)
    for lengths, whole in ((tiled, True), ([LONG[i] for i in SHORT], False)):
        mask = block_mask(PackedLayout.from_lengths(lengths).attention, None)
        assert bool((mask.full_kv_num_blocks > 0).any()) == whole
    assert long_lengths([500], None, tiled=True)[LONG.index(max(LONG))] == 503
    assert max(long_lengths([], 128, tiled=True)) == 128
    assert not measure._has_tiles(torch.device("cpu")) and measure._has_tiles(torch.device("cuda"))


@pytest.mark.parametrize("tiled", [True, False])
def test_a_kernel_that_forgets_a_tile_is_found(tiled, monkeypatch):
    """It drops what a query sees more than 256 tokens before it; documents as short as a CPU's would not show that."""
    attend = SdpaBackend.__call__

    def forgetful(self, query, key, value, call):
        return attend(self, query, key, value, replace(call, sliding_window=256))

    monkeypatch.setattr(SdpaBackend, "__call__", forgetful)
    monkeypatch.setattr(measure, "_has_tiles", lambda device: tiled)
    report = check(patch(tiny.model(**MODEL), backend="sdpa"))
    assert report.is_exact != tiled
    assert max(report.lengths) == (400 if tiled else 256)


@pytest.mark.parametrize("model_type", ["gpt2", "codegen", "ctrl", "mpt"])
def test_no_document_is_longer_than_a_table_of_positions(model_type, monkeypatch):
    """Nor the padding after the documents of a row: on CUDA a position beyond the table ends the process."""
    monkeypatch.setattr(measure, "_has_tiles", lambda device: True)
    model = patch(small_model(model_type))
    assert max_positions(find_state(model).parts.backbone) == 256
    report = check(model)
    assert report.is_exact and max(report.lengths) == 256, str(report)
    rows = Arrangement.of_rows((5, 3, 4), ((0, 1, 2), (1,), (2,)), torch.device("cpu")).layout
    assert rows.max_seqlen == 5 and rows.row_length == 12
    assert rows.lengths == (5, 3, 4, 3, 5, 4, 4, 5, 3)


def _unsteady(monkeypatch, by, *, every=1, attend=SdpaBackend.__call__):
    """Let packed attention give other values in every run, or in every so many calls, without random numbers."""
    calls = itertools.count(1)

    def unsteady(self, query, key, value, call):
        number = next(calls)
        out = attend(self, query, key, value, call)
        return out if number % every else out * (1 + by * (number % 7))

    monkeypatch.setattr(SdpaBackend, "__call__", unsteady)
    monkeypatch.setattr(isolation, "_is_steady", lambda device: False)


def _leaking(self, query, key, value, call, attend=SdpaBackend.__call__):
    lengths = call.layout.queries.lengths
    merged = PackedLayout.from_lengths((sum(lengths[:2]), *lengths[2:]))
    return attend(self, query, key, value, call.on(merged.attention))


@pytest.mark.parametrize("every", [1, 41], ids=["in every run", "once in a while"])
def test_other_bits_in_every_run_are_no_leak(every, monkeypatch):
    """A GPU's kernels that add in any order; seen once in 150 checks on an H200."""
    _unsteady(monkeypatch, 1e-6, every=every)
    report = check(patch(tiny.model(**MODEL), backend="sdpa"))
    assert report.is_exact and report["steadiness"].difference > 0, str(report)
    assert report["steadiness"].difference < TOLERANCES[torch.float32].outputs
    assert "equal runs differ by" in str(report)
    assert any("between runs of the same tokens" in row["what"] for row in report.table())


@pytest.mark.parametrize(("by", "attend"), [(1e-6, _leaking), (1e-2, SdpaBackend.__call__), (1e-3, _leaking)])
def test_a_leak_is_found_although_runs_differ(by, attend, monkeypatch):
    """And runs that differ by more than rounding prove nothing."""
    _unsteady(monkeypatch, by, attend=attend)
    report = check(patch(tiny.model(**MODEL), backend="sdpa"))
    assert report.verdict == "leak" and not report.is_exact and report["isolation"].difference > 0
    with pytest.raises(ContaminationError, match="runs of the same tokens differ by up to"):
        report.require_exact()


def test_a_cpus_kernels_must_give_the_same_bits(monkeypatch):
    assert isolation._is_steady(torch.device("cpu")) and not isolation._is_steady(torch.device("cuda"))
    report = check(patch(tiny.model(**MODEL), backend="sdpa"))
    assert report.is_exact and "steadiness" not in report and "equal runs" not in str(report)
    _unsteady(monkeypatch, 1e-6)
    monkeypatch.setattr(isolation, "_is_steady", lambda device: True)
    assert check(patch(tiny.model(**MODEL), backend="sdpa")).verdict == "leak"


class _Rounded(torch.autograd.Function):
    """Numbers that keep ten bits of their mantissa, as a GPU's float32 products round their factors."""

    @staticmethod
    def forward(ctx, x):
        return (x.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx, grad):
        return _Rounded.forward(ctx, grad)


@pytest.fixture
def tf32(monkeypatch):
    """Packed attention multiplies in TF32, as flex does; a document alone runs in another kernel."""
    attend = SdpaBackend.__call__

    def rounded(self, query, key, value, *rest):
        return attend(self, *map(_Rounded.apply, (query, key, value)), *rest)

    monkeypatch.setattr(SdpaBackend, "__call__", rounded)

    def known():
        for module in (rounding, subject):
            monkeypatch.setattr(module, "multiplies_in_tf32", lambda device: True)

    return known


def test_tf32_is_no_false_alarm_and_hides_no_leak(tf32, monkeypatch):
    """G15. The control does not know of it."""
    model = patch(tiny.model(**MODEL), backend="sdpa")
    assert not check(model)["parity"].holds
    tf32()
    report = check(model)
    assert report.is_exact and report.dtype == "float32 with TF32 products", str(report)
    # What the check takes for rounding: a product's, no other layer's.
    epsilon = [torch.finfo(dtype).eps for dtype in (torch.float16, torch.float32, torch.float32)]
    layers = nn.Linear(4, 4), nn.Embedding(4, 4), nn.LayerNorm(4)
    assert [rounding._last_place(layer, torch.zeros(1)) for layer in layers] == epsilon
    attend = SdpaBackend.__call__
    monkeypatch.setattr(SdpaBackend, "__call__", lambda self, *given: _leaking(self, *given, attend=attend))
    assert check(model).verdict == "leak"
    monkeypatch.setattr(rounding, "multiplies_in_tf32", lambda device: False)
    assert rounding._last_place(layers[0], torch.zeros(1)) == epsilon[1]


def test_no_device_is_asked_for_float64(monkeypatch):
    """Apple's have none: what is summed in it is on the host first."""
    on_host, kept, cpu, double = set(), [], torch.Tensor.cpu, torch.Tensor.double

    def copied(self, *args):
        copy = cpu(self, *args).clone()
        on_host.add(id(copy))
        kept.append(copy)  # keeps its id
        return copy

    def widened(self):
        if id(self) not in on_host:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework has no float64")
        return double(self)

    monkeypatch.setattr(torch.Tensor, "cpu", copied)
    monkeypatch.setattr(torch.Tensor, "double", widened)
    assert check(patch(tiny.model(**MODEL), backend="sdpa")).is_exact and kept
    with pytest.raises(TypeError, match="MPS"):
        torch.zeros(1).double()


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((7, 5), False)])
def test_tf32_is_what_torch_says(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    gpu, matmul = torch.device("cuda"), torch.backends.cuda.matmul
    assert not multiplies_in_tf32(gpu)
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        assert multiplies_in_tf32(gpu) == expected
        assert not multiplies_in_tf32(torch.device("cpu"))
    finally:
        matmul.fp32_precision = before
    older = SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True))  # torch before 2.9
    monkeypatch.setattr(torch.backends, "cuda", older)
    assert multiplies_in_tf32(gpu) == expected
