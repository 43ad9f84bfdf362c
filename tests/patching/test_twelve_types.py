"""Twelve types over all levels, compiled, and decoding by hand: what another transformers is likely to break first."""

import inspect

import pytest
import tiny
import torch
from padded import padded
from tiny_models import small_model
from tolerance import VISIBLE, assert_float32, assert_gradients
from transformers import DynamicCache, LlamaForCausalLM

from trl_packfa import check, describe, patch, unpatch

pytestmark = pytest.mark.versions

LEVELS = {
    "llama": "attention", "gemma3_text": "attention", "phi3": "attention", "mixtral": "interface",
    "gpt_oss": "interface", "smollm3": "interface", "deepseek_v3": "interface", "gpt2": "interface",
    "mamba2": "module", "qwen3_next": "module", "granitemoehybrid": "module", "openai-gpt": "document",
}  # fmt: skip
# The keywords by which this transformers takes a cache: both while the old one is deprecated.
CACHES = [
    name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaForCausalLM.forward).parameters
] or ["past_key_values"]
if "past_key_values" not in CACHES and hasattr(LlamaForCausalLM.forward, "__wrapped__"):
    CACHES.append("past_key_values")


@pytest.mark.parametrize("model_type", LEVELS)
def test_a_type_is_exact_at_its_level(model_type):
    model = small_model(model_type)
    ids = {"input_ids": torch.cat(tiny.documents())[None], "use_cache": False}
    before = model(**ids).logits
    assert f"level: {LEVELS[model_type]}" in describe(patch(model))
    report = check(model)
    assert report.verdict == "exact" and report["control"].difference > VISIBLE, str(report)
    assert torch.equal(unpatch(model)(**ids).logits, before)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt2"])
def test_a_compiled_model_computes_what_it_did(model_type):
    """However many graphs a version of torch makes of it."""
    model = patch(small_model(model_type))
    logits, gradients = tiny.logits_and_gradients(model)
    torch._dynamo.reset()
    found, theirs = tiny.logits_and_gradients(model, forward=torch.compile(model, backend="eager"))
    assert_float32(found, logits.double())
    assert_gradients(theirs, gradients)


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_next"])
def test_generation_is_what_it_was(model_type, unpad):
    model, batch = small_model(model_type), padded(tiny.documents((9, 4, 6)), "left")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**batch, **options)
    assert torch.equal(patch(model, unpad=unpad).generate(**batch, **options), expected)


@pytest.mark.parametrize("keyword", CACHES)
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_loop_that_hands_over_an_empty_cache_decodes_what_it_did(model_type, unpad, keyword):
    model = small_model(model_type)
    expected, without_prompt = decode(model, keyword), decode(model, keyword, forgets=True)
    assert not torch.equal(expected, without_prompt), "the prompt decides what comes"
    assert torch.equal(decode(patch(model, unpad=unpad), keyword), expected)


def decode(model, keyword, *, steps=5, forgets=False):
    """Logits of greedy steps after left-padded prompts, by a loop of one's own; `forgets` loses the cache."""
    batch, seen = padded(tiny.documents((9, 4, 6)), "left"), []
    ids, mask, cache = batch["input_ids"], batch["attention_mask"], DynamicCache(config=model.config)
    for _ in range(steps):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=True, **{keyword: cache}).logits[:, -1:]
        ids = logits.argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        if forgets:
            mask, cache = torch.ones_like(ids), DynamicCache(config=model.config)
        seen.append(logits)
    return torch.cat(seen, 1)
