"""One battery for every backend: a new backend adds a row to `BACKENDS`, not a file."""

import oracle
import pytest
import torch
from operations import OperationCounter
from tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, assert_float32, assert_low_precision, differs

from trl_packfa import PackedLayout
from trl_packfa.attention import BACKENDS, AttentionArguments, AttentionRequest, get_backend

NAMES = [backend.name for backend in BACKENDS]
CASES = {
    "causal": {},
    "window": {"sliding_window": 16},
    "window of one": {"sliding_window": 1},
    "softcap": {"softcap": 4.0},
    "softcap and window": {"softcap": 4.0, "sliding_window": 16},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "sliding_window": 16},
}
LAYOUTS = {
    "mixed": ((5, 70, 1, 30, 28), 1),
    "one document": ((40,), 1),
    "single tokens": ((1,) * 9, 1),
    "longer than a chunk": ((300, 7), 1),
    "rows": ((5, 15, 20, 1, 19), 3),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(num_tokens, *, dtype=torch.float32, head_dim=16, seed=0):
    """Query of 4 heads, key and value of 2, sinks; leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, 4, head_dim), (num_tokens, 2, head_dim), (num_tokens, 2, head_dim), (4,))
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]


def backend_for(name, dtype, case, **call):
    """Return the backend; skip with its reasons if it cannot run."""
    request = AttentionRequest(DEVICE, dtype, 16, 4, 2, **{**case, "sinks": "sinks" in case}, **call)
    if reasons := get_backend(name).refusals(request):
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return get_backend(name)


def packed(backend, layout):
    return lambda query, key, value, options: backend(
        query, key, value, AttentionArguments(**options).on(layout.attention)
    )


def by_oracle(lengths):
    return lambda query, key, value, options: oracle.attention(query, key, value, lengths, **options)


def run(attend, tensors, case, upstream):
    """Output and the gradients of query, key, value and, if there are any, sinks."""
    query, key, value, sinks = tensors
    out = attend(query, key, value, {**case, "scaling": 0.3, "sinks": sinks if case.get("sinks") else None})
    leaves = [query, key, value] + [sinks] * bool(case.get("sinks"))
    return [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def run_ways(ways, num_tokens, case, dtype=torch.float32):
    """For the output and each gradient, what every way of attending has for it."""
    tensors, upstream = inputs(num_tokens, dtype=dtype), torch.randn(num_tokens, 4, 16, device=DEVICE)
    return zip(*(run(way, tensors, case, upstream) for way in ways), strict=True)


def assert_right(attend, by_oracle, num_tokens, case):
    for actual, expected in run_ways((attend, by_oracle), num_tokens, case):
        assert_float32(actual, expected)


def assert_as_precise(attend, eager, by_oracle, num_tokens, case, dtype):
    factors = (FORWARD_FACTOR, *[GRADIENT_FACTOR] * 4)
    triples = run_ways((attend, eager, by_oracle), num_tokens, case, dtype)
    for triple, factor in zip(triples, factors, strict=False):
        assert_low_precision(*triple, factor=factor)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_float32_against_the_oracle(name, case):
    backend = backend_for(name, torch.float32, case)
    for lengths, rows in LAYOUTS.values():
        layout = PackedLayout.from_lengths(lengths, rows=rows, device=DEVICE)
        assert_right(packed(backend, layout), by_oracle(lengths), layout.num_tokens, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_against_eager_attention(name, case, dtype):
    assert_as_precise_as_eager_attention(backend_for(name, dtype, case), case, dtype)


def assert_as_precise_as_eager_attention(backend, case, dtype):
    lengths = LAYOUTS["mixed"][0]
    layout = PackedLayout.from_lengths(lengths, device=DEVICE)
    ours, eager = (packed(which, layout) for which in (backend, get_backend("reference")))
    assert_as_precise(ours, eager, by_oracle(lengths), layout.num_tokens, case, dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_isolation_is_exact_to_the_bit(name, case, dtype):
    backend = backend_for(name, dtype, case)
    lengths = LAYOUTS["mixed"][0]
    layout = PackedLayout.from_lengths(lengths, device=DEVICE)
    upstream = torch.randn(layout.num_tokens, 4, 16, device=DEVICE)
    before = inputs(layout.num_tokens, dtype=dtype)
    changed_document = slice(5, 75)
    after = [tensor.detach().clone() for tensor in before]
    for tensor in after[:3]:
        tensor[changed_document] = torch.randn_like(tensor[changed_document])
    results = [
        run(packed(backend, layout), [t.requires_grad_() for t in tensors], case, upstream)
        for tensors in (before, after)
    ]
    others = torch.ones(layout.num_tokens, dtype=torch.bool)
    others[changed_document] = False
    # Sinks, which come last, get a gradient of every document.
    assert all(torch.equal(x[others], y[others]) for x, y in zip(*(found[:4] for found in results), strict=True))
    out, out_after = (found[0] for found in results)
    assert not torch.equal(out[~others], out_after[~others]), "the change must be one"


def test_negative_control_without_boundaries_is_seen():
    lengths = LAYOUTS["mixed"][0]
    tensors = inputs(sum(lengths))
    whole = PackedLayout.from_lengths([sum(lengths)], device=DEVICE)
    leaking = packed(get_backend("reference"), whole)(*tensors[:3], {"scaling": 0.3})
    assert differs(leaking, oracle.attention(*tensors[:3], lengths, scaling=0.3))


@pytest.mark.parametrize("case", [CASES["causal"], CASES["window"], CASES["softcap"]], ids=["causal", "window", "cap"])
def test_flex_masks_and_scores_on_a_cpu_without_gradients(case):
    """torch has flex's forward on a CPU: enough to test our block mask and score function where there is no GPU."""
    lengths, rows = LAYOUTS["rows"]
    layout = PackedLayout.from_lengths(lengths, rows=rows)
    with torch.no_grad():
        query, key, value = (t.detach().cpu() for t in inputs(layout.num_tokens)[:3])
        out = get_backend("flex")(query, key, value, AttentionArguments(scaling=0.3, **case).on(layout.attention))
    assert_float32(out, oracle.attention(query, key, value, lengths, scaling=0.3, **case))


def test_dropout_drops_and_scales():
    layout = PackedLayout.from_lengths([64, 32])
    query, key = torch.zeros(96, 4, 16), torch.zeros(96, 2, 16)
    value = torch.ones(96, 2, 16)
    for name in ("sdpa", "reference"):
        out = get_backend(name)(query, key, value, AttentionArguments(scaling=1.0, dropout=0.5).on(layout.attention))
        assert (out == 0).any(), "first tokens see one key, which is dropped half of the time"
        assert abs(out.mean().item() - 1) < 0.1


def test_memory_of_a_packed_row_grows_with_its_tokens_not_with_their_square():
    """Counted, not timed: the largest tensor that a forward and backward makes stays linear."""
    largest = {}
    for copies in (4, 32):
        layout = PackedLayout.from_lengths([50, 120, 7, 200] * copies)
        query, key, value, _ = inputs(layout.num_tokens)
        for case in ({}, {"sliding_window": 16}, {"softcap": 4.0}):
            with OperationCounter() as counter:
                packed(get_backend("sdpa"), layout)(query, key, value, {"scaling": 0.3, **case}).sum().backward()
            largest.setdefault(str(case), []).append(counter.largest / layout.num_tokens)
    for case, (small, large) in largest.items():
        assert large <= 1.2 * small, case
