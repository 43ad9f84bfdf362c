"""`padding_free(trainer, share_prefixes=True)`: TRL's trainers train as they did, prompts computed once."""

import pickle

import pytest
import tiny
import torch
from calls import watched
from selection import exhaustive, in_full
from trl_trainers import OF_MICRO_BATCHES, beyond, build, build_packed, pairs, run, train

import trl_packfa
from trl_packfa.data.collating import CountingCollator
from trl_packfa.errors import ContaminationError
from trl_packfa.layout import PackedLayout, shared_rows
from trl_packfa.patching.forwards import BackboneOverride
from trl_packfa.patching.state import find_state

OVER_PADS = {"logits/chosen", "logits/rejected"}


def with_prompts():
    """Pairs whose prompts are long enough to be shared, and some whose are not."""
    return [{**row, "prompt": tiny.words(10 + i % 23, seed=i) + " "} for i, row in enumerate(pairs())]


def sharing(*args, **options):
    return trl_packfa.padding_free(build(*args, **options), share_prefixes=True)


def both(kind, out, **options):
    """The logs padded and with shared prompts, and the trainer of these."""
    options = {"data": with_prompts(), "max_steps": 4, **options}
    expected, _ = run(build, kind, out, **options)
    return expected, *run(sharing, kind, out, **options)


@pytest.mark.parametrize("lora", [True, *exhaustive(False)], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["dpo", "reward", "grpo", *in_full("orpo", "cpo", "tpo", "rloo", "kto")])
def test_shared_prefixes_train_as_padded(kind, lora, tmp_path):
    expected, logs, trainer = both(kind, tmp_path, lora=lora)
    assert not beyond(expected, logs, besides=OVER_PADS if kind in ("orpo", "cpo") else ())
    shared = logs[-1]["prefixes_shared"]
    # A prompt has one completion in a batch of KTO's; four in GRPO's and RLOO's.
    assert shared == 0 if kind == "kto" else 0.1 < shared < 0.8
    assert trainer.trl_packfa_padding_free.first_calls.keys() == trainer.trl_packfa_padding_free.models.keys()


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_packed_trainer_shares_prompts_in_recut_steps(kind, tmp_path):
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    options = {"data": with_prompts(), "max_steps": 3, **batches}
    expected, _ = run(build, kind, tmp_path, **options)
    logs, _ = run(build_packed, kind, tmp_path, share_prefixes=True, **options)
    assert not beyond(expected, logs, besides=OF_MICRO_BATCHES[kind])
    assert all(entry["prefixes_shared"] > 0.1 for entry in logs)
    assert min(entry["micro_batches"] for entry in logs) < 4


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"bf16": True}, {"loss_type": ["ipo", "sft"],
                         "ld_alpha": None}, {"precompute_ref_log_probs": True}, {"max_length": 24}],
                         ids=lambda options: next(iter(options)))  # fmt: skip
@pytest.mark.parametrize("lora", [False, *exhaustive(True)], ids=["full", "lora"])
def test_dpo_with_what_it_can_do(options, lora, tmp_path):
    expected, logs, _ = both("dpo", tmp_path, lora=lora, **options)
    assert not beyond(expected, logs, dtype=torch.bfloat16 if "bf16" in options else torch.float32)
    assert logs[-1]["prefixes_shared"] > 0.1


def test_negative_control_prompts_that_are_forgotten_are_found_in_the_first_batch(tmp_path, monkeypatch):
    def take(self, call, rows):
        documents = [(i,) for i in range(len(rows.segments))]
        return rows.take_call(call), PackedLayout.from_lengths(rows.segments, documents=documents)

    trainer = sharing("dpo", tmp_path, data=with_prompts(), max_steps=1)
    monkeypatch.setattr(BackboneOverride, "_taken", take)
    with pytest.raises(ContaminationError, match=r"DPOTrainer\.model: the first batch without its pads is not exact"):
        trainer.train()


def test_rows_are_compared_by_the_collator_and_by_no_model(tmp_path, monkeypatch):
    trainer = sharing("dpo", tmp_path, data=with_prompts(), max_steps=2)
    compared = watched(monkeypatch, shared_rows, "share")
    train(trainer)
    assert not compared and all(find_state(m).unpadding.shared for m in (trainer.model, trainer.ref_model))
    ids = torch.arange(1, 41).repeat(2, 1)
    ids[1, 30:] = 99
    batch = {"x_input_ids": ids, "x_attention_mask": torch.ones_like(ids), "attention_mask": torch.ones_like(ids)}
    collated = pickle.loads(pickle.dumps(CountingCollator(dict, share_prefixes=True)))(batch)
    assert collated.keys() == batch.keys() and not compared
    assert collated.rows.keys() == {"x_attention_mask", "attention_mask"}
    assert collated.compared.keys() == {"x_input_ids"}
    rows = collated["x_attention_mask"]
    found = shared_rows.shared_rows_of(shared_rows.PaddedRows.from_mask(rows), collated["x_input_ids"])
    assert found.segments == (30, 10, 10) and not compared


def test_without_it_nothing_is_shared_or_said(tmp_path):
    trainer = build("dpo", tmp_path, data=with_prompts(), max_steps=1)
    trl_packfa.padding_free(trainer)
    assert "prefixes_shared" not in train(trainer)[-1] and find_state(trainer.model).unpadding.sharing is None
