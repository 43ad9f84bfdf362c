"""Which backend serves a request, why the others do not, and what their kernels are called with."""

import sys

import pytest
import torch
from pretended import on_any_device

from trl_packfa import PackedLayout, attention
from trl_packfa.attention import BACKENDS, AttentionArguments, AttentionRequest, base, flash, get_backend, varlen
from trl_packfa.errors import NoBackend
from trl_packfa.layout.length_groups import group_by_length


def test_groups_cover_every_document_once_and_waste_little():
    lengths = tuple(torch.randint(1, 500, (300,), generator=torch.Generator().manual_seed(0)).tolist())
    groups = group_by_length(lengths, torch.device("cpu"))
    assert sorted(i for group in groups for i in group) == list(range(300))
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    assert padded / sum(lengths) < 1.15
    on_gpu = group_by_length(lengths, torch.device("cuda"))
    assert sorted(i for group in on_gpu for i in group) == list(range(300)) and len(on_gpu) < len(groups)
    assert max(len(group) * lengths[group[0]] for group in on_gpu) <= 16384


def test_refusals_name_every_reason():
    request = AttentionRequest(torch.device("cpu"), torch.float32, 12, 4, 2, dropout=0.1, sinks=True, softcap=3.0)
    reasons = attention.refusals(request)
    assert reasons["varlen"] == [
        "needs a CUDA or ROCm device, the model is on cpu", "needs float16 or bfloat16, got float32",
        "needs a head_dim that is a multiple of 8 up to 256, got 12", "varlen_attn has no softcap",
        "varlen_attn has no attention sinks", "varlen_attn has no dropout, the model asks for 0.1",
    ]  # fmt: skip
    assert reasons["sdpa"] == reasons["reference"] == []
    for name in ("flex", "flash"):
        assert "needs a CUDA or ROCm device, the model is on cpu" in reasons[name]


def test_auto_takes_the_first_without_refusals_and_a_named_backend_runs_or_raises():
    in_float32 = AttentionRequest(torch.device("cpu"), torch.float32, 16, 4, 2)
    assert attention.resolve(in_float32).name == "sdpa", "never reference"
    assert attention.resolve(in_float32, "reference").name == "reference"
    said = r"asked for: varlen\): device=cpu dtype=float32 head_dim=16(.|\n)*needs a CUDA"
    with pytest.raises(NoBackend, match=said):
        attention.resolve(in_float32, "varlen")
    with pytest.raises(NoBackend, match=r"no attention backend 'fa2'(.|\n)*'flash', 'varlen', 'flex', 'sdpa'"):
        attention.BackendChoice("fa2")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SERVED = AttentionRequest(torch.device("cpu"), torch.bfloat16, head_dim=64, num_heads=8, num_key_value_heads=2)
ASKED = {"sliding_window": 16, "softcap": 30.0, "sinks": True, "dropout": 0.1, "bias": True}


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS])
def test_what_a_backend_lacks_it_refuses_and_what_it_has_it_takes(name, monkeypatch):
    """Features, dtypes, and widths of heads."""
    backend = get_backend(name)
    on_any_device(monkeypatch, type(backend))
    capabilities = backend.capabilities
    dtypes = capabilities.dtypes or DTYPES
    assert {dtype for dtype in DTYPES if not capabilities.refusals(SERVED._replace(dtype=dtype))} == set(dtypes)
    served = SERVED._replace(dtype=dtypes[0])
    for feature, value in ASKED.items():
        reasons = capabilities.refusals(served._replace(**{feature: value}))
        assert bool(reasons) != getattr(capabilities, feature), feature
        assert all(reason.startswith(capabilities.function) for reason in reasons)
    widths = [width for width in range(1, 300) if not capabilities.refusals(served._replace(head_dim=width))]
    step, most = capabilities.head_dim_multiple, capabilities.max_head_dim or 299
    assert widths == [w for w in range(1, most + 1) if w % step == 0 and w >= capabilities.min_head_dim]


@pytest.mark.parametrize(("head_dim", "value_dim", "rounded"), [
    (8, 8, 32), (40, 40, 64), (64, 64, 64), (72, 72, 96), (80, 80, 96), (88, 96, 96), (112, 112, 128), (128, 128, 128),
    (192, 128, 192), (200, 200, 256), (256, 256, 256),
])  # fmt: skip
def test_flash_index_overflow_counts_heads_as_its_backward_rounds_them(head_dim, value_dim, rounded, monkeypatch):
    """Up to 128 more tokens a document; a batch below the limit is the control, and one without gradients."""
    layout, heads = PackedLayout.from_lengths([1_000] * 64), 32
    needed = (64_000 + 128 * 64) * heads * rounded

    def exceeds(grads=True):
        qkv = [torch.empty(64_000, heads, width, device="meta", requires_grad=grads, dtype=torch.bfloat16)
               for width in (head_dim, head_dim, value_dim)]  # fmt: skip
        return base.exceeds_int32(*qkv, layout.attention)

    monkeypatch.setattr(base, "_MAX_ELEMENTS", needed)
    assert exceeds() and not exceeds(grads=False)
    monkeypatch.setattr(base, "_MAX_ELEMENTS", needed + 1)
    assert not exceeds()


def test_one_batch_beyond_flashs_index_runs_on_another_backend(monkeypatch):
    for backend in (flash.FlashBackend, varlen.VarlenBackend):
        on_any_device(monkeypatch, backend)
        monkeypatch.setattr(backend, "refusals", lambda self, request: self.capabilities.refusals(request))
    usual, choice = AttentionRequest(torch.device("cpu"), torch.bfloat16, 64, 4, 2), attention.BackendChoice("auto")
    names = [choice.for_request(usual._replace(exceeds_int32=huge)).name for huge in (False, True, False)]
    assert names == ["flash", "sdpa", "flash"]
    with pytest.raises(NoBackend, match=r"huge\n(.|\n)*less than 2\^31 \(lower max_length(.|\n)*backend='auto'"):
        attention.BackendChoice("varlen").for_request(usual._replace(exceeds_int32=True))
    call = AttentionArguments(scaling=1.0).on(PackedLayout.from_lengths([5, 3]).attention)
    qkv = [torch.zeros(8, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    assert choice.for_call(*qkv, call).name == "flash"
    monkeypatch.setattr(base, "_MAX_ELEMENTS", 8)
    assert choice.for_call(*qkv, call).name == "sdpa"


@pytest.mark.parametrize(("source", "said"), [
    ("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi')", "undefined symbol"),
    ("import no_such_package", "No module named 'no_such_package'"),
    ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    (None, None),
    ("", None),
])  # fmt: skip
def test_a_flash_attn_that_does_not_import_is_not_called_missing(source, said, tmp_path, monkeypatch):
    """Built for another torch, as after an upgrade."""
    if source is not None:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    here, find = source is not None, flash.find_spec
    monkeypatch.setattr(flash, "find_spec", lambda name: find(name) if here and name == "flash_attn" else None)
    monkeypatch.setattr(flash, "_capability", lambda device: (9, 0))
    on_any_device(monkeypatch, flash.FlashBackend)
    monkeypatch.setattr(flash, "_KERNELS", {})
    monkeypatch.setattr(flash, "_BROKEN", {})
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    request = AttentionRequest(torch.device("cuda"), torch.bfloat16, head_dim=64, num_heads=8, num_key_value_heads=8)
    reasons = "\n".join(get_backend("flash").refusals(request))
    sys.modules.pop("flash_attn", None)
    if said is None:
        assert reasons.startswith("needs the flash-attn package (pip install flash-attn)")
    else:
        assert reasons.startswith("flash_attn is installed but cannot be imported (") and said in reasons
        assert f"built for torch {torch.__version__}" in reasons and "needs the flash-attn" not in reasons
