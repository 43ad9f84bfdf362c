"""Batches cut for several ranks, and models that run the parts: logits, losses and gradients of the whole row."""

import copy

import pytest
import tiny
import torch
from ranks import Ranks
from tiny_models import small_model
from tolerance import assert_float32, assert_recomputed, differs

import trl_packfa
from trl_packfa import DataCollatorForPacking, PackedLayout, shard_batch
from trl_packfa.errors import InvalidConfig, InvalidLayout, UnsupportedModel
from trl_packfa.layout.shard import RowShard
from trl_packfa.parallel import sequence_parallel


def experts(model):
    """Let experts multiply one after the other: torch's grouped product takes no float64."""
    model.set_experts_implementation("eager")
    return model


LENGTHS = (13, 1, 29, 7, 21)  # 71 tokens: two ranks share 72, four as well
KINDS = {
    **{name: lambda name=name: tiny.model(name, layers=2) for name in ("llama", "qwen3", "gemma2")},
    "gpt_oss": lambda: experts(small_model("gpt_oss", num_attention_heads=4, num_key_value_heads=2)),
    # tables of the whole row: frequencies depend on a document's length
    "long rope": lambda: tiny.model("phi3-longrope", layers=2),
    "dynamic rope": lambda: tiny.model("llama-dynamic", layers=2),
    # a causal LM that passes nothing on, and learned positions
    "gpt2": lambda: small_model("gpt2", num_attention_heads=4, num_hidden_layers=2),
}


def batch_of(lengths=LENGTHS, vocabulary=90):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return DataCollatorForPacking(return_flash_attn_kwargs=False)([{"input_ids": ids} for ids in documents])


def run(model, batch):
    labels = batch.get("shift_labels")
    if labels is None:
        labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    call = {name: value for name, value in batch.items() if "labels" not in name}
    logits = model(**call, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach()[0], loss.detach(), gradients


def shared(monkeypatch, model, batch, size, cut=shard_batch):
    """Return what all ranks make together: logits, the sum of the losses, and the sum of the gradients."""
    models = [trl_packfa.patch(copy.deepcopy(model)) for _ in range(size)]
    parts = Ranks(size).run(monkeypatch, lambda shard: run(models[shard.rank], cut(batch, shard)))
    names = parts[0][2]
    logits = torch.cat([part[0] for part in parts])[: batch["input_ids"].numel()]
    return logits, sum(part[1] for part in parts), {name: sum(part[2][name] for part in parts) for name in names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_row_of_one(monkeypatch, kind, size):
    model, batch = KINDS[kind]().double(), batch_of()
    expected = run(trl_packfa.patch(copy.deepcopy(model)), batch)
    found = shared(monkeypatch, model, batch, size)
    assert_float32(found[0], expected[0])  # norms and rotations compute in float32
    assert_float32(found[1], expected[1])
    for name, gradient in expected[2].items():
        assert_recomputed(found[2][name].float(), gradient.float())


def test_transformers_own_losses_add_up(monkeypatch):
    model, batch = KINDS["llama"]().double(), batch_of()
    models = [trl_packfa.patch(copy.deepcopy(model)) for _ in range(2)]
    expected = models[0](**batch, num_items_in_batch=10).loss

    def loss(shard):
        return models[shard.rank](**shard_batch(batch, shard), num_items_in_batch=10).loss.detach()

    parts = Ranks(2).run(monkeypatch, loss)
    assert_float32(sum(parts), expected.detach())
    assert differs(parts[0] * 2, expected.detach())


def test_labels_that_are_cut_before_they_are_shifted_are_not_those_of_one(monkeypatch):
    """The control: the last token of a part has no label."""

    def cut(batch, shard):
        part = shard_batch(batch, shard)
        part["shift_labels"][:, -1] = -100
        return part

    model, batch = KINDS["llama"]().double(), batch_of()
    expected = run(trl_packfa.patch(copy.deepcopy(model)), batch)
    assert differs(shared(monkeypatch, model, batch, 2, cut)[1], expected[1])


def test_a_batch_is_cut_into_parts_of_one_row():
    batch = {**batch_of((3, 4)), "weights": torch.arange(7.0)[None], "source": "a"}
    parts = [shard_batch(batch, RowShard(rank, 2)) for rank in range(2)]
    assert [part["input_ids"].shape for part in parts] == [(1, 4), (1, 4)]
    names = ("input_ids", "position_ids", "shift_labels")
    ids, positions, told = (torch.cat([part[name] for part in parts], dim=1).tolist()[0] for name in names)
    assert ids == [*batch["input_ids"][0].tolist(), 0] and positions == [0, 1, 2, 0, 1, 2, 3, 0]
    # The last token of a document predicts nothing, and the label of the first token of a part is not lost.
    labels = batch["labels"][0].tolist()
    assert told == [*labels[1:3], -100, *labels[4:7], -100, -100]
    layout = parts[1]["packed_layout"]
    assert layout.lengths == (3, 4, 1) and layout.padding == 1 and layout.local_shape == (1, 4)
    assert parts[0]["weights"].tolist() == [[0.0, 1.0, 2.0, 3.0]] and parts[0]["source"] == "a"
    assert layout.to("cpu").shard is layout.shard and layout.whole.shard is None


def test_a_row_shorter_than_its_ranks_is_padded():
    parts = [shard_batch(batch_of((2,)), RowShard(rank, 4)) for rank in range(4)]
    assert [part["input_ids"].numel() for part in parts] == [1] * 4
    assert [int((part["shift_labels"] != -100).sum()) for part in parts] == [1, 0, 0, 0]


def test_rows_of_a_batch_become_one(monkeypatch):
    ids = torch.randint(1, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "packed_layout": PackedLayout.from_lengths([2, 4, 6], rows=2)}
    model = KINDS["llama"]().double()
    expected = trl_packfa.patch(copy.deepcopy(model))(**{k: v for k, v in batch.items() if k != "labels"}).logits
    found = shared(monkeypatch, model, batch, 2)[0]
    assert_float32(found, expected.flatten(0, 1))


def test_batches_without_boundaries_are_refused():
    ids = torch.ones((1, 4), dtype=torch.long)
    with pytest.raises(InvalidLayout, match=r"without document boundaries cannot be shared(.|\n)*packed_layout"):
        shard_batch({"input_ids": ids}, RowShard(0, 2))


def test_positions_of_several_axes_are_refused():
    batch = batch_of()
    with pytest.raises(InvalidLayout, match=r"position_ids of shape \(3, 1, 71\) cannot be cut"):
        shard_batch({**batch, "position_ids": batch["position_ids"].expand(3, 1, -1)}, RowShard(0, 2))


def test_tokens_that_are_not_the_part_are_refused():
    batch = batch_of()
    layout = shard_batch(batch, RowShard(0, 2))["packed_layout"]
    with pytest.raises(InvalidLayout, match=r"72 tokens is shared, each process holds 36(.|\n)*shard_batch"):
        trl_packfa.patch(KINDS["llama"]())(input_ids=batch["input_ids"], packed_layout=layout)


@pytest.mark.parametrize(("kind", "reason"), [
    ("mamba", "documents run one by one in MambaMixer"),
    ("openai-gpt", "the backbone runs document by document"),
    ("bloom", "adds a bias to the scores"),
])  # fmt: skip
def test_models_that_need_whole_rows_are_refused(kind, reason):
    model = trl_packfa.patch(small_model(kind, num_hidden_layers=1))
    said = rf"does not support sequence_parallel=2(.|\n)*{reason}(.|\n)*sequence_parallel=1"
    with pytest.raises(UnsupportedModel, match=said):
        model(**shard_batch(batch_of(vocabulary=40), RowShard(0, 2)))


def test_a_process_outside_of_the_group_is_refused(monkeypatch):
    monkeypatch.setattr(sequence_parallel.distributed, "get_rank", lambda group: -1)
    with pytest.raises(InvalidConfig, match="this process is not in the group"):
        RowShard.of(object())
