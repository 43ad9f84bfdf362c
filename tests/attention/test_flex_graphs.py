"""The flex backend's compiled kernel: not another graph for other documents, and never torch's unfused way, which
materializes the scores, however many kinds of attention a process asks for."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from tolerance import FORWARD_FACTOR, assert_low_precision
from torch._dynamo.exc import FailOnRecompileLimitHit

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, flex, get_backend
from trl_packfa.bench.measuring import compiled_graphs

LENGTHS = ((300, 20), (5, 130, 64), (250, 250, 1, 1), (129,), (140, 2, 290, 33, 7))
WINDOWS, SOFTCAPS, SINKS, GRADIENTS = (None, 64), (None, 30.0), (False, True), (True, False)


@pytest.fixture(autouse=True)
def _flex_anew():
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()


@pytest.fixture
def limits(monkeypatch):
    """torch's own, at which it raises; graphs run without torch's inductor, which needs a GPU for the backward."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    names = {"recompile_limit": 8, "accumulated_recompile_limit": 8, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**names):
        yield


def attend(lengths, window=None, softcap=None, sinks=False, gradients=True):
    layout = PackedLayout.from_lengths(lengths)
    query, key, value = (torch.randn(1, heads, layout.num_tokens, 16) for heads in (4, 2, 2))
    score_mod = None if softcap is None else flex._capped(softcap)
    options = {"score_mod": score_mod, "block_mask": flex._block_mask(layout.attention, window), "return_lse": sinks}
    with torch.set_grad_enabled(gradients):
        return flex._compiled()(query, key, value, scale=0.25, enable_gqa=True, **options)


def attend_in_every_way():
    for kind in product(WINDOWS, SOFTCAPS, SINKS, GRADIENTS):
        for lengths in LENGTHS[:2]:
            attend(lengths, *kind)


@pytest.mark.usefixtures("limits")
def test_other_documents_are_the_same_graph():
    for lengths in LENGTHS:
        attend(lengths)
    assert compiled_graphs() == 1


@pytest.mark.slow
@pytest.mark.usefixtures("limits")
def test_every_kind_of_attention_is_compiled(monkeypatch):
    """The control leaves torch's limit as it is."""
    with monkeypatch.context() as patch, pytest.raises(FailOnRecompileLimitHit):
        patch.setattr(flex, "allow_graphs", lambda most: nullcontext())
        attend_in_every_way()
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    attend_in_every_way()
    assert compiled_graphs() > 8


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, 256), (torch.bfloat16, 192)])
def test_flex_has_block_sizes_for_heads_of_192_in_float32(dtype, wide, monkeypatch):
    """Seen on an H200 with torch 2.11: more shared memory than the GPU has. Zeros change nothing."""
    widths, attend = [], flex.flex_attention

    def flex_attention(query, key, value, **options):
        widths.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    layout = PackedLayout.from_lengths([5, 130, 2])
    q, k, v = (torch.randn(137, 4, width).to(dtype) for width in (192, 192, 128))
    call = AttentionArguments(scaling=192**-0.5).on(layout.attention)
    out, expected = (get_backend(name)(q, k, v, call) for name in ("flex", "reference"))
    assert widths == [(wide, wide, 128)] and out.shape == v.shape
    exact = get_backend("reference")(q.double(), k.double(), v.double(), call)
    assert_low_precision(out, expected, exact, factor=FORWARD_FACTOR)
