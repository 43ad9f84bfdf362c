"""One battery for every backend on every kind of layout: a new backend adds a row to `BACKENDS`, not a file."""

import oracle
import pytest
import torch
from dense import dense_mask
from operations import OperationCounter
from pretended import pretend
from tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, assert_float32, assert_low_precision, differs

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, AttentionRequest, BackendChoice, linear_bias
from trl_packfa.attention.backends import BACKENDS, get_backend
from trl_packfa.errors import InvalidLayout, PackingError
from trl_packfa.layout.bidirectional import BidirectionalSpans, plan_spans

NAMES = [backend.name for backend in BACKENDS]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {
    "causal": {},
    "window": {"sliding_window": 16},
    "window of one": {"sliding_window": 1},
    "softcap": {"softcap": 4.0},
    "softcap and window": {"softcap": 4.0, "sliding_window": 16},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "sliding_window": 16},
}


def layout_of(*lengths, **options):
    return PackedLayout.from_lengths(lengths, device=DEVICE, **options)


MIXED = layout_of(5, 70, 1, 30, 28)
# Bidirectional spans inside of these documents: at a beginning, in the middle, two that touch, at the end.
SPANS = ((5, 12), (30, 44), (80, 84), (84, 90), (130, 134))
ROWS = layout_of(5, 15, 20, 1, 19, rows=3)
ONE, SINGLE_TOKENS, LONGER_THAN_A_CHUNK = layout_of(40), layout_of(*(1,) * 9), layout_of(300, 7)
PAIR = layout_of(40, 9, 21, documents=((0, 1), (0, 2)))
TREE = layout_of(20, 18, 2, 5, 1, 6, documents=((0, 1, 2), (5,), (0, 3), (0, 1, 4), (0, 1)))
KINDS = {
    "documents": [MIXED, ONE, SINGLE_TOKENS, LONGER_THAN_A_CHUNK, ROWS],
    "shared prefixes": [
        TREE, PAIR, layout_of(17, 1, 30, 5, 25, 12, documents=((0, 1), (3, 4), (0, 2), (3, 5))),
        layout_of(300, 7, 280, documents=((0, 1), (0, 2))),
    ],
    "both directions": [x.in_both_directions() for x in (MIXED, ONE, SINGLE_TOKENS, LONGER_THAN_A_CHUNK)],
    "spans": [MIXED.with_bidirectional(BidirectionalSpans(SPANS, SPANS))],
    "joined spans": [MIXED.with_bidirectional(BidirectionalSpans(SPANS, SPANS, True))],
}  # fmt: skip


def can_be(kind, case):
    """Bidirectional spans fit into the window, and joined ones have none."""
    window = case.get("sliding_window")
    return window is None or kind not in ("spans", "joined spans") or (kind == "spans" and window > 1)


every_kind = pytest.mark.parametrize(
    ("kind", "case"), [(kind, name) for kind in KINDS for name, case in CASES.items() if can_be(kind, case)]
)
every_backend = pytest.mark.parametrize("name", NAMES)
some_cases = pytest.mark.parametrize("case", ["causal", "window", "softcap"])


def inputs(num_tokens, *, dtype=torch.float32, head_dim=16, seed=0):
    """Query of 4 heads, key and value of 2, sinks; leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, 4, head_dim), (num_tokens, 2, head_dim), (num_tokens, 2, head_dim), (4,))
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]


def skip_if_refused(name, dtype, case, kind="documents"):
    for causal in (True, False) if kind not in ("documents", "shared prefixes") else (True,):
        request = AttentionRequest(DEVICE, dtype, 16, 4, 2, **{**case, "sinks": "sinks" in case}, causal=causal)
        if reasons := get_backend(name).refusals(request):
            pytest.skip(f"{name}: {'; '.join(reasons)}")


def by(name, layout):
    choice = BackendChoice(name)
    return lambda q, k, v, options: choice.attend(q, k, v, layout, AttentionArguments(**options))


def exact(layout):
    """Attention in float64: by loops over queries; of shared prefixes, each document by itself; else by a mask."""

    def attend(query, key, value, options):
        if layout.shares_prefixes:
            gather = layout.sequence_gather
            documents = (x[gather.index] for x in (query, key, value))
            out = oracle.attention_of_documents(*documents, layout.full_sequences.lengths, **options)
            return out[gather.first_index]
        if layout.causal and layout.bidirectional is None:
            return oracle.attention(query, key, value, layout.lengths, **options)
        options = dict(options)
        mask = dense_mask(layout, options.pop("sliding_window", None))
        return oracle.masked_attention(query, key, value, mask, **options)

    return attend


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


def assert_as_precise_as_eager_attention(name, layout, case, dtype):
    ways = (by(name, layout), by("reference", layout), exact(layout))
    factors = (FORWARD_FACTOR, *[GRADIENT_FACTOR] * 4)
    for triple, factor in zip(run_ways(ways, layout.num_tokens, case, dtype), factors, strict=False):
        assert_low_precision(*triple, factor=factor)


@every_kind
@every_backend
def test_float32_against_the_oracle(name, kind, case):
    skip_if_refused(name, torch.float32, CASES[case], kind)
    for layout in KINDS[kind]:
        for actual, expected in run_ways((by(name, layout), exact(layout)), layout.num_tokens, CASES[case]):
            assert_float32(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_kind
@every_backend
def test_low_precision_against_eager_attention(name, kind, case, dtype):
    skip_if_refused(name, dtype, CASES[case], kind)
    assert_as_precise_as_eager_attention(name, KINDS[kind][0], CASES[case], dtype)


@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize(("kind", "case"), [
    (kind, case) for kind in KINDS for case in ("causal", "window") if can_be(kind, CASES[case])
])  # fmt: skip
def test_flash_attention_is_told_of_each_kind(backend, kind, case, monkeypatch):
    """By stand-ins of the kernels, which align queries and keys at a document's end, as those do, and refuse any
    window that they are not to be asked for."""
    dtypes = pretend(monkeypatch, backend)
    for layout in KINDS[kind]:
        assert_as_precise_as_eager_attention(backend, layout, CASES[case], torch.bfloat16)
    assert len(dtypes) == len(KINDS[kind]) * (2 if "spans" in kind else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("layout", "case", "changed", "prefix"), [
    *[pytest.param(MIXED, case, slice(5, 75), 0, id=name) for name, case in CASES.items()],
    pytest.param(PAIR, {}, slice(40, 49), 40, id="branches"),
])  # fmt: skip
@every_backend
def test_isolation_is_exact_to_the_bit(name, layout, case, changed, prefix, dtype):
    skip_if_refused(name, dtype, case)
    upstream = torch.randn(layout.num_tokens, 4, 16, device=DEVICE)
    before = inputs(layout.num_tokens, dtype=dtype)
    after = [tensor.detach().clone() for tensor in before]
    for tensor in after[:3]:
        tensor[changed] = torch.randn_like(tensor[changed])
    given = (before, [tensor.requires_grad_() for tensor in after])
    results = [run(by(name, layout), tensors, case, upstream) for tensors in given]
    others = torch.ones(layout.num_tokens, dtype=torch.bool)
    others[changed] = False
    outs, gradients = zip(*((found[0], found[1:4]) for found in results), strict=True)
    assert torch.equal(*(out[others] for out in outs))
    others[:prefix] = False  # it has gradients of both branches, and sinks have one of every document
    assert all(torch.equal(x[others], y[others]) for x, y in zip(*gradients, strict=True))
    assert not torch.equal(*(out[changed] for out in outs)), "the change must be one"


SPANNED, JOINED = KINDS["spans"][0], KINDS["joined spans"][0]
WRONG = {
    "one document": (MIXED, layout_of(134)),
    "causal": (MIXED.in_both_directions(), MIXED),
    "a branch sees another": (PAIR, layout_of(40, 9, 21, documents=[(0, 1, 2)])),
    "no prefix": (PAIR, layout_of(40, 9, 21)),
    "no spans": (SPANNED, MIXED),
    "spans that touch are one": (
        SPANNED,
        MIXED.with_bidirectional(BidirectionalSpans(((5, 12), (30, 44), (80, 90), (130, 134)), ())),
    ),
    "spans see each other": (SPANNED, JOINED),
}


@pytest.mark.parametrize(("layout", "wrong"), WRONG.values(), ids=WRONG)
def test_negative_control_another_layout_is_seen(layout, wrong):
    tensors, options = inputs(layout.num_tokens)[:3], {"scaling": 0.3}
    assert differs(by("sdpa", wrong)(*tensors, options), exact(layout)(*tensors, options))


@some_cases
@pytest.mark.parametrize("kind", ["documents", "shared prefixes"])
def test_flex_masks_and_scores_on_a_cpu_without_gradients(kind, case):
    """torch has flex's forward on a CPU: enough to test our block mask and score function where there is no GPU."""
    options = {"scaling": 0.3, **CASES[case]}
    for layout in (layout.to("cpu") for layout in KINDS[kind]):
        query, key, value = (t.detach().cpu() for t in inputs(layout.num_tokens)[:3])
        keys, values = (layout.attention.gather_keys(x) for x in (key, value))
        with torch.no_grad():
            out = get_backend("flex")(query, keys, values, AttentionArguments(**options).on(layout.attention))
        assert_float32(out, exact(layout)(query, key, value, options))


def test_a_bias_is_told_of_documents():
    query, key, value, _ = inputs(TREE.num_tokens)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05], device=DEVICE)
    arguments = AttentionArguments(scaling=0.3, bias=linear_bias(slopes, TREE.full_sequences))
    documents = [TREE.sequence_gather.gather(x) for x in (query, key, value)]
    alone = get_backend("reference")(*documents, arguments.on(TREE.full_sequences.attention))
    for name in ("sdpa", "reference"):
        found = BackendChoice(name).attend(query, key, value, TREE, arguments)
        assert_float32(found, alone[TREE.sequence_gather.first_index].double())


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_dropout_drops_and_scales(name):
    layout = PackedLayout.from_lengths([64, 32])
    query, key, value = torch.zeros(96, 4, 16), torch.zeros(96, 2, 16), torch.ones(96, 2, 16)
    out = get_backend(name)(query, key, value, AttentionArguments(scaling=1.0, dropout=0.5).on(layout.attention))
    assert (out == 0).any(), "first tokens see one key, which is dropped half of the time"
    assert abs(out.mean().item() - 1) < 0.1


def largest_tensor(layout, case):
    query, key, value, _ = inputs(layout.num_tokens)
    with OperationCounter() as counter:
        by("sdpa", layout)(query, key, value, {"scaling": 0.3, **case}).sum().backward()
    return counter.largest


@some_cases
def test_memory_of_a_packed_row_grows_with_its_tokens_not_with_their_square(case):
    """Counted, not timed: the largest tensor that a forward and backward makes stays linear."""
    layouts = [PackedLayout.from_lengths([50, 120, 7, 200] * copies) for copies in (4, 32)]
    small, large = (largest_tensor(layout, CASES[case]) / layout.num_tokens for layout in layouts)
    assert large <= 1.2 * small


def test_what_is_copied_of_a_shared_prefix_is_linear_in_the_documents():
    """No mask of pairs: the largest tensor is as long as the documents together."""
    layout = PackedLayout.from_lengths([900, 50, 60], documents=[(0, 1), (0, 2)])
    assert largest_tensor(layout, {}) <= min(8 * layout.full_sequences.num_tokens * 4 * 16, 900 * 900)


@pytest.mark.parametrize(("layout", "options", "said"), [
    (JOINED, {"sliding_window": 90},
     "images of a row see each other, but the layer has a sliding window of 90"),
    (SPANNED, {"sliding_window": 8},
     "14 tokens of an image see each other, but the layer's sliding window has 8"),
    (SPANNED, {"bias": lambda q, k: torch.zeros(q.shape[0], 1, q.shape[1], k.shape[1])},
     "adds a term to its scores"),
], ids=["joined in a window", "wider than the window", "bias"])  # fmt: skip
def test_attention_to_spans_that_cannot_be_computed_is_refused(layout, options, said):
    with pytest.raises(PackingError, match=said):
        by("sdpa", layout)(*inputs(layout.num_tokens)[:3], {"scaling": 0.3, **options})


def test_spans_that_are_none_are_refused():
    with pytest.raises(InvalidLayout, match=r"span \(4, 7\) is not inside a document"):
        plan_spans([(4, 7)], [5, 6])
    with pytest.raises(InvalidLayout, match="cannot share prefixes"):
        shared = PackedLayout.from_lengths([3, 2, 1], documents=[(0, 1), (0, 2)])
        shared.with_bidirectional(BidirectionalSpans(((0, 2),), ()))
