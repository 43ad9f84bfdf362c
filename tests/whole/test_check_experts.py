"""Experts in the check: what rounding sends elsewhere is no leak, and what other tokens or packing choose is seen."""

import pytest
import torch
from selection import exhaustive
from test_check_power import LAYER, with_dtype
from tiny_models import small_model

from trl_packfa import check, patch
from trl_packfa.checking.following import find_traced
from trl_packfa.layout.call_context import current_call
from trl_packfa.patching.state import find_state


@pytest.mark.parametrize(("model_type", "dtype"), [
    ("gpt_oss", "bfloat16"), ("deepseek_v32", "autocast"),
    *exhaustive(*((name, dtype) for name in ("mixtral", "deepseek_v3", "qwen3_next", "granitemoe", "olmoe")
                  for dtype in ("bfloat16", "autocast"))),
    *exhaustive(("gpt_oss", "autocast"), ("deepseek_v32", "bfloat16")),
])  # fmt: skip
def test_tokens_that_rounding_sends_elsewhere_are_no_false_alarm(model_type, dtype):
    """Another expert, another key chosen by an indexer: discontinuous where rounding is not."""
    model, context = with_dtype(patch(small_model(model_type)), dtype)
    with context:
        report = check(model)
    assert report.is_exact, str(report)


def test_a_leak_among_experts_is_told_from_regrouping():
    model = patch(small_model("mixtral").bfloat16())
    assert check(model).is_exact

    def leaks(module, args, output):
        packed = current_call().layout is not None
        return (output[0] + 1e-2 * output[0][:, :1], output[1]) if packed else output  # of the first document

    model.get_submodule(LAYER).register_forward_hook(leaks)
    assert check(model).verdict == "leak"


def by_load(module, args, output):
    """Experts by the load of all tokens of the call, as balancing without a loss chooses, with equal weights."""
    logits, scores, chosen = output
    own = logits.detach().softmax(-1)
    balanced = (own - own.mean(0, keepdim=True)).topk(chosen.shape[-1], -1).indices
    return logits, scores * 0 + 1 / chosen.shape[-1], balanced


def by_row_number(module, args, output):
    logits, scores, chosen = output
    numbers = torch.arange(len(chosen))[:, None] + torch.arange(chosen.shape[-1])
    return logits, scores, numbers % logits.shape[-1]


def next_if_packed(module, args, output):
    logits, scores, chosen = output
    return output if current_call().layout is None else (logits, scores, (chosen + 1) % logits.shape[-1])


def heavier_if_packed(module, args, output):
    logits, scores, chosen = output
    return output if current_call().layout is None else (logits, scores * 1.5, chosen)


def within_capacity(module, args, output):
    """Each expert takes at most a third of its share of a row, in the row's order; other tokens get a weight of 0."""
    logits, scores, chosen = output
    most, kept = max(1, len(chosen) // 3), torch.ones_like(scores)
    for expert in range(logits.shape[-1]) if len(chosen) > 1 else ():
        kept[(chosen == expert).any(-1).nonzero().flatten()[most:]] = 0
    return logits, scores * kept, chosen


@pytest.mark.parametrize(("fault", "verdict", "model_type", "dtype"), [
    (by_load, "leak", "mixtral", "float32"), (by_row_number, "differs", "deepseek_v3", "float32"),
    (next_if_packed, "differs", "mixtral", "bfloat16"),
    *exhaustive(*((fault, verdict, model_type, dtype)
                  for fault, verdict in ((by_load, "leak"), (by_row_number, "differs"), (next_if_packed, "differs"),
                                         (heavier_if_packed, "differs"), (within_capacity, "leak"))
                  for model_type in ("mixtral", "qwen3_moe", "deepseek_v3") for dtype in ("float32", "bfloat16"))),
])  # fmt: skip
def test_experts_that_other_tokens_or_packing_choose_are_seen(fault, verdict, model_type, dtype):
    """The check once replaced a router's choice by that for the document alone, so it never compared it."""
    model = patch(small_model(model_type).to(getattr(torch, dtype)))
    for router in find_traced(model, find_state(model)).routers.values():
        router.register_forward_hook(fault)
    assert check(model).verdict == verdict
