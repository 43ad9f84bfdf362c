"""Random batches, sane and hostile: each is exact, left alone or refused by name, never silently different."""

import copy
import os
import random
from collections import Counter

import batches
import pytest
import tiny
import torch
from batches import REFUSED, UNPACKED
from tiny_models import small_model
from tolerance import assert_float32, differs

from trl_packfa import PackedLayout, patch
from trl_packfa.errors import PackingError
from trl_packfa.layout.from_call import layout_of

# A model of each level, whether it counts positions by itself, how many it has learned, its share of 10,000 batches.
MODELS = {
    "llama": (lambda: tiny.model(layers=1), False, None, 6000),
    "phi3-longrope": (lambda: tiny.model("phi3-longrope", layers=1), True, None, 1000),
    "gpt2": (lambda: small_model("gpt2", num_hidden_layers=1, max_position_embeddings=64), False, 64, 1000),
    "gpt_neo": (lambda: small_model("gpt_neo", max_position_embeddings=64), True, 64, 1000),
    "mamba": (lambda: small_model("mamba", num_hidden_layers=1), True, None, 600),
    "roformer": (lambda: small_model("roformer", num_hidden_layers=1, max_position_embeddings=64), True, 64, 400),
}
WITHOUT_POSITIONS = ("mamba", "roformer")


def with_layout(call, *, rows=True):
    """The call as a model takes it: a packed layout in the place of lengths."""
    call = dict(call)
    lengths = call.pop("lengths", None)
    if lengths is not None:
        call["packed_layout"] = PackedLayout.from_lengths(lengths, rows=len(call["input_ids"]) if rows else 1)
    return call


def test_boundaries_are_found_or_refused_by_name():
    found = Counter()
    for number, rng in batches.seeds(4000, seed=1):
        call = batches.batch(rng, 50)
        options = {"ignores_position_ids": rng.random() < 0.3, "most": None}
        expected = batches.meaning(call, **options)
        try:
            layout = layout_of(with_layout(call, rows=False), ignores_position_ids=options["ignores_position_ids"])
            actual = UNPACKED if layout is None else layout.lengths
        except PackingError:
            actual = REFUSED
        meant = tuple(end - start for _, start, end, _ in expected) if isinstance(expected, list) else expected
        assert actual == meant, (number, call)
        found[expected if isinstance(expected, str) else "packed"] += 1
    assert min(found.values()) > 400 and len(found) == 3, found


class Alone:
    """Float64 logits of documents by themselves, remembered: tiny documents repeat."""

    def __init__(self, model, takes_positions):
        self.model, self.takes_positions, self.known = copy.deepcopy(model).double(), takes_positions, {}

    @torch.no_grad()
    def __call__(self, ids, start):
        key = (tuple(ids.tolist()), start)
        if key not in self.known:
            positions = {"position_ids": torch.arange(start, start + len(ids))[None]} if self.takes_positions else {}
            logits = self.model(input_ids=ids[None], use_cache=False, **positions).logits[0]
            if len(ids) > 6:
                return logits
            self.known[key] = logits
        return self.known[key]


def outcome(model, call):
    try:
        with torch.no_grad():
            return model(**call).logits
    except Exception as error:
        return type(error).__name__


def require_same(actual, expected, context):
    same = torch.equal(actual, expected) if isinstance(expected, torch.Tensor) else actual == expected
    assert same, (actual, expected, context)


def fuzz(name, count, *, seed):
    """Run so many batches through a patched model; how many were packed, left alone and refused."""
    build, ignores_position_ids, most, _ = MODELS[name]
    plain = build()
    model = patch(copy.deepcopy(plain))
    alone, found = Alone(plain, name not in WITHOUT_POSITIONS), Counter()
    vocabulary = plain.config.vocab_size
    for number, rng in batches.seeds(count, seed=f"{name}-{seed}"):
        call = batches.batch(rng, vocabulary)
        expected = batches.meaning(call, ignores_position_ids=ignores_position_ids, most=most)
        found[expected if isinstance(expected, str) else "packed"] += 1
        if expected == REFUSED:
            with pytest.raises(PackingError), torch.no_grad():
                model(**with_layout(call, rows=False))
                raise AssertionError(f"not refused: {number} {call}")
        elif expected == UNPACKED:
            require_same(outcome(model, call), outcome(plain, call), (number, call))
        else:
            with torch.no_grad():
                logits = model(**with_layout(call, rows=False)).logits
            ids = call["input_ids"]
            oracle_logits = [alone(ids[row, start:end], first) for row, start, end, first in expected]
            ours = [logits[row, start:end] for row, start, end, _ in expected]
            assert_float32(torch.cat(ours), torch.cat(oracle_logits))
    return found


BATCHES = int(os.environ.get("FUZZ_BATCHES", "1000"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_batches_are_exact_or_refused(name):
    """`FUZZ_BATCHES=10000` tries all; CI a thousand."""
    count = MODELS[name][3] * BATCHES // 10_000
    found = fuzz(name, count, seed=1)
    print(name, dict(found))
    assert min(found[kind] for kind in ("packed", REFUSED, UNPACKED)) > count // 20
    assert sum(share for *_, share in MODELS.values()) == 10_000


def test_thousands_of_tiny_documents_beside_a_huge_one():
    rng = random.Random(0)
    lengths = [*(rng.randint(1, 2) for _ in range(3000)), 700]
    ids = torch.tensor([[rng.randrange(1, 4) for _ in range(sum(lengths))]])
    plain = tiny.model(layers=1, max_position_embeddings=1024)
    alone, layout = Alone(plain, True), PackedLayout.from_lengths(lengths)
    with torch.no_grad():
        logits = patch(copy.deepcopy(plain))(input_ids=ids, position_ids=layout.position_ids()).logits
    expected = [alone(document, 0) for document in layout.split(ids)]
    assert_float32(logits[0], torch.cat(expected))


def test_negative_control_the_unpatched_model_leaks():
    """What the fuzz would see if packing did nothing: the same comparison fails."""
    plain, docs = tiny.model(layers=1), tiny.documents()
    alone = Alone(plain, True)
    call = {"input_ids": torch.cat(docs)[None]}
    expected = torch.cat([alone(ids, 0) for ids in docs])
    assert differs(outcome(plain, call)[0], expected)
    masked = {**call, "position_ids": PackedLayout.from_lengths(tiny.LENGTHS).position_ids()}
    assert differs(outcome(plain, {**masked, "attention_mask": torch.ones_like(call["input_ids"])})[0], expected)
