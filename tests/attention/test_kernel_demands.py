"""What GPU kernels ask of their callers, held without a GPU: by stand-ins as strict as the kernels, by refusals of
devices that are described, and by questions of torch. `benchmarks/gpu/README.md` says what each would have broken."""

import sys
from types import SimpleNamespace

import oracle
import pytest
import torch
from pretended import on_any_device, pretend
from test_attention import by, exact
from tolerance import assert_low_precision
from torch._dynamo.exc import TorchRuntimeError

from trl_packfa import PackedLayout, attention, hub_kernel
from trl_packfa.attention import AttentionArguments, AttentionRequest, flash, get_backend, resolve, varlen
from trl_packfa.attention import flex as flex_module
from trl_packfa.attention import sdpa as sdpa_module
from trl_packfa.errors import NoBackend

LENGTHS = (5, 70, 1, 30, 28)
CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16
ON_CUDA = AttentionRequest(CUDA, BF16, head_dim=64, num_heads=8, num_key_value_heads=2)


def random(*shapes, dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_flex_runs_the_kernel_that_trains_whatever_the_rows_length(monkeypatch):
    """G1. The kernel for decoding has no configuration for short rows whose heads share keys."""
    calls = []

    def flex_attention(query, key, value, *, kernel_options=None, **options):
        if query.shape[2] < 128 and not (kernel_options or {}).get("FORCE_USE_FLEX_ATTENTION"):
            raise RuntimeError("NoValidChoicesError")
        calls.append(query.shape)
        return query

    monkeypatch.setattr(flex_module, "flex_attention", flex_attention)
    layout = PackedLayout.from_lengths((11, 1, 37, 5, 19))
    q, k, v = random((73, 4, 16), (73, 2, 16), (73, 2, 16))
    get_backend("flex")(q, k, v, AttentionArguments(scaling=0.25).on(layout.attention))
    assert calls == [(1, 4, 73, 16)]


def test_a_softcap_is_a_constant_of_flexs_graph(monkeypatch, request):
    """G2. As a tensor that a graph is handed, it could not be lowered where there are no gradients."""
    request.addfinalizer(flex_module._compiled.cache_clear)  # other tests must not find this test's compiler
    handed = []

    def compiler(graph, example_inputs):
        kinds = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
        floats = [isinstance(x, (float, torch.SymFloat)) or getattr(x, "dtype", 0) == torch.float64 for x in kinds]
        handed.append(any(floats))
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=compiler, **options))
    for settings in (flex_module._SETTINGS, {}):  # the second is the control
        torch._dynamo.reset()
        flex_module._compiled.cache_clear()
        monkeypatch.setattr(flex_module, "_SETTINGS", settings)
        layout = PackedLayout.from_lengths((140, 20))
        q, k, v = (torch.randn(1, heads, 160, 16) for heads in (4, 2, 2))
        for cap in (30.0, 50.0):  # another model of the same process
            score, mask = flex_module._capped(cap), flex_module._block_mask(layout.attention, None)
            try:
                with torch.no_grad():
                    flex_module._compiled()(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True, scale=0.25)
            except TorchRuntimeError:  # torch 2.15 cannot trace a softcap that is a tensor
                handed.append(True)
    assert handed[:2] == [False, False] and any(handed[2:]), "the second half is the control"


@pytest.mark.parametrize("dims", [(24, 16), (16, 24)], ids=["narrow values", "wide values"])
@pytest.mark.parametrize("backend", ["varlen", "flash"])
def test_flash_attention_takes_values_of_another_width(backend, dims, monkeypatch):
    """G3. Multi-head latent attention (DeepSeek); the kernels know one head dim, as their stand-ins do."""
    pretend(monkeypatch, backend)
    layout, tokens = PackedLayout.from_lengths(LENGTHS), sum(LENGTHS)
    tensors = random((tokens, 4, dims[0]), (tokens, 4, dims[0]), (tokens, 4, dims[1]))
    upstream, results = torch.randn(tokens, 4, dims[1]), []
    for attend in (by(backend, layout), by("reference", layout), exact(layout)):
        out = attend(*tensors, {"scaling": 0.3})
        assert out.shape == upstream.shape
        results.append([out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))])
    for ours, eager, true in zip(*results, strict=True):
        assert_low_precision(ours, eager, true, factor=3.0)


def test_no_kernel_is_asked_for_values_that_are_too_wide(monkeypatch):
    """G3, G4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(flash._KERNELS, (9, 0), None)
    monkeypatch.setattr(flex_module, "find_spec", lambda name: True)
    flex = get_backend("flex")
    for asked, backend in (({"head_dim": 192, "value_dim": 128}, "varlen"), ({"softcap": 30.0}, "flex"),
                           ({"head_dim": 512}, "sdpa"), ({"value_dim": 512}, "sdpa"),
                           ({"dtype": torch.float64}, "sdpa")):  # fmt: skip
        assert resolve(ON_CUDA._replace(**asked)).name == backend, asked
    assert flex.refusals(ON_CUDA._replace(value_dim=512)) == ["needs a value_dim that is up to 256, got 512"]
    assert "needs float16 or bfloat16 or float32, got float64" in flex.refusals(ON_CUDA._replace(dtype=torch.float64))
    query, key, value = torch.empty(3, 4, 24), torch.empty(3, 2, 24), torch.empty(3, 2, 16)
    arguments = AttentionArguments(scaling=1.0).on(PackedLayout.from_lengths([3]).attention)
    assert AttentionRequest.of(query, key, key, arguments).value_dim is None
    request = AttentionRequest.of(query, key, value, arguments)
    assert request.value_dim == 16 and "value_dim=16" in request.describe()


@pytest.mark.parametrize("scaling", [0.25, 0.1])
def test_a_varlen_attn_without_scale_is_given_scaled_queries(scaling, monkeypatch):
    """G5. torch 2.10's signature."""
    layout, tokens = PackedLayout.from_lengths(LENGTHS), sum(LENGTHS)

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        assert is_causal
        arguments = AttentionArguments(scaling=query.shape[-1] ** -0.5)
        return get_backend("reference")(query, key, value, arguments.on(layout.attention))

    on_any_device(monkeypatch, varlen.VarlenBackend)
    monkeypatch.setattr(varlen, "_varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen, "_PARAMETERS", frozenset(varlen_attn.__code__.co_varnames))
    tensors = random((tokens, 4, 16), (tokens, 2, 16), (tokens, 2, 16))
    out = get_backend("varlen")(*tensors, AttentionArguments(scaling=scaling).on(layout.attention))
    eager = get_backend("reference")(*tensors, AttentionArguments(scaling=scaling).on(layout.attention))
    assert_low_precision(out, eager, oracle.attention(*tensors, LENGTHS, scaling=scaling), factor=2.0)


@pytest.mark.skipif(varlen._varlen_attn is None, reason="torch < 2.10")
@pytest.mark.parametrize(("dims", "heads"), [((64, 64), (4, 2)), ((24, 16), (4, 4)), ((256, 256), (4, 1))])
@pytest.mark.parametrize("window", [None, 8])
def test_torch_s_own_operator_takes_our_call(dims, heads, window, monkeypatch):
    """On the meta device, which knows signatures and shapes, forward and backward."""
    monkeypatch.setattr(varlen, "cast_to_autocast_dtype", lambda *tensors: tensors)  # meta has no autocast
    layout = PackedLayout.from_lengths(LENGTHS).to("meta")
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    tensors = [torch.randn(sum(LENGTHS), *s, dtype=BF16, device="meta", requires_grad=True) for s in shapes]
    out = get_backend("varlen")(*tensors, AttentionArguments(scaling=0.3, sliding_window=window).on(layout.attention))
    assert out.shape == (sum(LENGTHS), heads[0], dims[1]) and out.dtype is BF16
    grads = torch.autograd.grad(out, tensors, torch.empty_like(out))
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in tensors]


@pytest.mark.versions
@pytest.mark.parametrize("is_traceable", [True, False])
def test_a_kernel_that_is_no_operator_is_one_inside_of_graphs(is_traceable, monkeypatch):
    """G9. FlashAttention 4 compiles itself when it is called, where Dynamo would cut the graph at every layer."""
    pretend(monkeypatch, "flash")
    strict = flash._KERNELS[(8, 0)].function

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                               causal=False):  # fmt: skip
        if not is_traceable:
            assert not torch.compiler.is_compiling(), "Dynamo came upon a kernel that it cannot follow"
        return strict(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)

    kernel = flash._kernel_of(flash_attn_varlen_func, is_traceable=is_traceable)
    monkeypatch.setitem(flash._KERNELS, (8, 0), kernel)
    names = []

    def compiler(graph, example_inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    choice, layout = attention.BackendChoice("flash"), PackedLayout.from_lengths(LENGTHS)

    @torch.compile(backend=compiler, fullgraph=True)
    def attend(q, k, v, layout):
        return choice.attend(q, k, v, layout, AttentionArguments(scaling=0.25))

    tensors = random(*[(sum(LENGTHS), heads, 16) for heads in (4, 2, 2)])
    assert layout.graph_tensors  # a patched backbone asks for them before the graph
    out = attend(*tensors, layout)
    assert torch.equal(out, choice.attend(*tensors, layout, AttentionArguments(scaling=0.25)))
    assert any("require_longest" in name for name in names) == is_traceable


@pytest.fixture
def packages(monkeypatch):
    """Every flash-attn package is installed; calling the Hub fails the test unless it is allowed."""

    def varlen_func(name):
        def flash_attn_varlen_func(q, k, v, **options):
            return q

        flash_attn_varlen_func.package = name
        return flash_attn_varlen_func

    def install(*names):
        for name in ("flash_attn_interface", "flash_attn.cute", "flash_attn"):
            found = name in names
            module = SimpleNamespace(flash_attn_varlen_func=varlen_func(name)) if found else None
            monkeypatch.setitem(sys.modules, name, module)
        known = {name.split(".")[0] for name in names}
        monkeypatch.setattr(flash, "find_spec", lambda name: name if name in known else None)
        monkeypatch.setattr(flash, "_KERNELS", {})

    return install


@pytest.mark.parametrize(("capability", "package", "version"), [
    ((8, 0), "flash_attn", "2"), ((8, 9), "flash_attn", "2"), ((9, 0), "flash_attn_interface", "3"),
    ((10, 0), "flash_attn.cute", "4"), ((12, 0), "flash_attn.cute", "4"),
])  # fmt: skip
def test_each_gpu_gets_the_flash_attention_that_was_written_for_it(capability, package, version, packages):
    """G10. FlashAttention 3 has no code for Blackwell, and 4 is a beta where 3 runs."""
    packages("flash_attn_interface", "flash_attn.cute", "flash_attn")
    kernel = flash._kernel(capability)
    assert (kernel.function.package, kernel.version, kernel.is_traceable) == (package, version, version != "4")
    packages("flash_attn_interface")
    assert (flash._kernel(capability) is not None) == (capability == (9, 0))


@pytest.fixture
def given(monkeypatch):
    """Return a function that calls flash-attn, whose kernel knows one option, and returns what it was handed."""
    layout = PackedLayout.from_lengths([3, 5])

    def call(option, *, dtype=BF16, **arguments):
        handed = {}
        kernel = flash._Kernel(lambda q, k, v, **options: handed.update(options) or q, frozenset([option]))
        monkeypatch.setattr(flash, "_capability", lambda device: (9, 0))
        monkeypatch.setitem(flash._KERNELS, (9, 0), kernel)
        tensors = random((8, 4, 16), (8, 2, 16), (8, 2, 16), dtype=dtype)
        get_backend("flash")(*tensors, AttentionArguments(scaling=0.3, **arguments).on(layout.attention))
        return handed.get(option)

    return call


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
def test_sinks_are_handed_over_in_half_precision(name, given):
    """G11. They are float32 weights under autocast."""
    with torch.autocast("cpu", BF16):
        sinks = given(name, dtype=torch.float32, sinks=torch.randn(4, requires_grad=True))
    assert sinks.dtype is BF16 and sinks.requires_grad


def test_a_deterministic_run_asks_flash_attn_for_it(given, monkeypatch):
    assert given("deterministic") is None
    with monkeypatch.context() as patch:
        patch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
        assert given("deterministic") is True
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert given("deterministic") is True


def test_the_hub_is_asked_only_by_who_names_the_backend(packages, monkeypatch):
    """G19. It downloads and runs other people's code."""
    asked = []

    def hub():
        asked.append("hub")
        return lambda q, k, v, window_size=None: q

    packages()
    monkeypatch.setattr(flash, "find_spec", lambda name: name if name == "kernels" else None)
    monkeypatch.setattr(hub_kernel, "hub_flash_attn_varlen_func", hub)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert resolve(ON_CUDA).name == "varlen" and not asked
    assert "attention_backend='flash'" in get_backend("flash").refusals(ON_CUDA)[0] and not asked
    assert resolve(ON_CUDA, "flash").name == "flash" and asked == ["hub"]
    with pytest.raises(NoBackend, match="no softcap"):
        resolve(ON_CUDA._replace(softcap=3.0), "flash")
    assert get_backend("flash").kernels(ON_CUDA) == "FlashAttention 2, from the Hub"
    assert resolve(ON_CUDA).name == "varlen", "a model that was named it earlier changes no other model"
    assert asked == ["hub"]


def test_flash_attention_4_serves_the_heads_that_it_has(packages, monkeypatch):
    """Heads of up to 128, or DeepSeek's 192 with values of 128, which it takes as they are; others run elsewhere."""
    packages("flash_attn.cute")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    dims = {(128, None): "flash", (192, 128): "flash", (192, None): "varlen", (256, None): "varlen", (24, 16): "flash"}
    for (head_dim, value_dim), backend in dims.items():
        request = ON_CUDA._replace(head_dim=head_dim, value_dim=value_dim)
        assert resolve(request).name == backend
        assert backend != "flash" or get_backend(backend).kernels(request) == "FlashAttention 4"
    (reason,) = get_backend("flash").refusals(ON_CUDA._replace(head_dim=256))
    assert reason == "FlashAttention 4 needs heads of up to 128 (or 192 with values of 128), got 256"
    seen, layout = [], PackedLayout.from_lengths([3, 5])

    def kernel(q, k, v, **options):
        seen.append(v.shape[-1])
        return q.new_zeros(*q.shape[:2], v.shape[-1])

    monkeypatch.setattr(flash, "_capability", lambda device: (10, 0))
    monkeypatch.setitem(flash._KERNELS, (10, 0), flash._kernel_of(kernel, **flash._PACKAGES[1].limits))
    for wide, narrow in ((192, 128), (24, 16)):
        tensors = random((8, 4, wide), (8, 4, wide), (8, 4, narrow))
        out = get_backend("flash")(*tensors, AttentionArguments(scaling=0.3).on(layout.attention))
        assert out.shape == (8, 4, narrow)
    assert seen == [128, 24], "DeepSeek's values come unpadded"


def test_sdpa_never_plans_a_graph_per_shape(monkeypatch):
    """G12. cuDNN's kernels are switched off for the call, and on again."""
    kernels = torch.backends.cuda

    def enabled():
        return (kernels.cudnn_sdp_enabled(), kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(),
                kernels.math_sdp_enabled())  # fmt: skip

    before, seen, used = enabled(), [], sdpa_module._kernels
    attend = sdpa_module.F.scaled_dot_product_attention
    watched = lambda *args, **kwargs: seen.append(enabled()) or attend(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(sdpa_module.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(sdpa_module, "_kernels", lambda device: used("cuda"))
    layout = PackedLayout.from_lengths((300, 20))
    tensors = random((320, 4, 16), (320, 2, 16), (320, 2, 16), dtype=torch.float32)
    for window in (None, 16):
        call = AttentionArguments(scaling=0.25, sliding_window=window).on(layout.attention)
        get_backend("sdpa")(*tensors, call).sum().backward()  # chunks are computed again in the backward
    assert len(seen) >= 5 and set(seen) == {(False, True, True, True)} and enabled() == before


@pytest.mark.parametrize(("flash_takes", "efficient_takes"), [(True, False), (False, True), (False, False)])
def test_key_value_heads_are_copied_only_where_no_fused_kernel_shares_them(flash_takes, efficient_takes, monkeypatch):
    """G12."""
    monkeypatch.setattr(sdpa_module, "SDPAParams", lambda *call: call)
    monkeypatch.setattr(sdpa_module, "can_use_flash_attention", lambda call: flash_takes)
    monkeypatch.setattr(sdpa_module, "can_use_efficient_attention", lambda call: efficient_takes)
    query, key = (SimpleNamespace(shape=(1, heads, 9, 16), device=CUDA, dtype=BF16) for heads in (8, 2))
    monkeypatch.setattr(sdpa_module, "cast_to_autocast_dtype", lambda *tensors: tensors)
    assert sdpa_module._shares_heads(query, key, key, None, 0.0, True) == (flash_takes or efficient_takes)
    assert not sdpa_module._shares_heads(query, query, query, None, 0.0, True)


def test_projections_that_lie_in_one_are_not_copied(monkeypatch):
    """Phi-3's queries, keys and values are parts of one product; what is not aligned, or in a graph, is copied."""
    fused = torch.randn(9, 3, 4, 16, dtype=BF16)
    for part in fused.unbind(1):
        assert varlen._as_kernels_read(part) is part
    for other in (fused.transpose(2, 3)[:, 0], fused.flatten()[1:-63].view(-1, 4, 16), fused[:1, 0].expand(9, 4, 16)):
        assert varlen._as_kernels_read(other).is_contiguous()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert varlen._as_kernels_read(fused[:, 0]).is_contiguous()


def test_rocm_is_served_by_what_is_installed(packages, monkeypatch):
    """By package and shape; whatever capability the device reports, as that is no NVIDIA's."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pytest.fail("an NVIDIA GPU's"))
    monkeypatch.setattr(flex_module, "find_spec", lambda name: name)
    packages("flash_attn_interface", "flash_attn.cute", "flash_attn")
    assert resolve(ON_CUDA).name == "flash" and flash._KERNELS[(8, 0)].function.package == "flash_attn"
    packages()
    assert resolve(ON_CUDA).name == "varlen" and resolve(ON_CUDA._replace(softcap=30.0)).name == "flex"
    assert resolve(ON_CUDA._replace(dtype=torch.float32, head_dim=512)).name == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
@pytest.mark.parametrize("device", ["xpu", "mps", "cuda"], ids=["XPU", "MPS", "Turing"])
def test_accelerators_without_flash_attention_attend_by_document(device, dtype, monkeypatch):
    """Windows, softcap, sinks and wide heads too; what else was tried says why not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    options = {"sliding_window": 16, "softcap": 30.0, "sinks": True, "head_dim": 512}
    for asked in ({}, *({name: value} for name, value in options.items())):
        request = ON_CUDA._replace(device=torch.device(device), dtype=dtype, **asked)
        assert resolve(request).name == "sdpa"
        for backend in ("flash", "varlen", "flex"):
            reason = get_backend(backend).refusals(request)[0]
            assert ("8.0 or newer, this GPU has 7.5" if device == "cuda" else f"the model is on {device}") in reason
