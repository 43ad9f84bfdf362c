"""Experts: losses, gradients and the routers' auxiliary loss of TRL's padded run, whatever a step is cut into."""

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import exhaustive
from tiny_models import small_model
from tolerance import assert_another_run, assert_float32, assert_trajectory, assert_weights
from training import arguments, batches_of, dataset, lora_config, losses, packed_trainer
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTTrainer, patch
from trl_packfa.errors import InvalidConfig, UnsupportedModel
from trl_packfa.packing import recut_over_ranks
from trl_packfa.patching.router_loss import BalancedModel
from trl_packfa.trainers.sft.loss_terms import PaddedTerms

# Accumulation, batch size, strategy, pad_to_multiple_of, coefficient; None is the model's own, 0.001 or 0.01.
RUNS = [(8, 2, "step", None, 1.0), (3, 4, "step", None, None), (4, 3, "step", 64, 1.0)]
MORE = [("mixtral", (1, 2, "step", 16, 1.0)), ("olmoe", (2, 2, "minibatch", 64, 1.0))]
TYPES = ["mixtral", "olmoe", "qwen3_moe", "gpt_oss", "ernie4_5_moe"]
IN_TURN = [(name, RUNS[number % len(RUNS)]) for number, name in enumerate(TYPES)]
OTHERS = [(name, run) for name in TYPES for run in (*RUNS, (8, 1, "step", None, 1.0)) if (name, run) not in IN_TURN]
# Every loss and gradient of a step shows in its weights as it is.
PLAIN = {
    "optim": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0, "lr_scheduler_type": "constant", "max_steps": 3,
    "max_length": 96,
}  # fmt: skip


def trained(cls, args, *, name="mixtral", **changes):
    data = {"train_dataset": dataset(), "eval_dataset": dataset(10, seed=5), "processing_class": tiny.tokenizer()}
    trainer = cls(small_model(name, num_hidden_layers=2, **changes), args, **data)
    trainer.train()
    return trainer


def pair(tmp_path, *, strategy="step", name="mixtral", **options):
    options = {**PLAIN, "out": tmp_path, **options}
    padded = trained(SFTTrainer, arguments(SFTConfig, **options), name=name)
    ours = arguments(packing_strategy=strategy, use_peft=False, check_packing=False, **options)
    return padded, trained(PackedSFTTrainer, ours, name=name)


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(trainer):
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def test_dropout_on_experts_is_refused_by_its_field(tmp_path):
    """TRL's default is 0.05, which PEFT refuses with a ValueError that names no field."""
    with pytest.raises(InvalidConfig, match=r"lora_dropout=0\.05 on a mixture of experts(.|\n)*Set lora_dropout=0"):
        packed_trainer(arguments(out=tmp_path), model=small_model("mixtral"), peft_config=None)


@pytest.mark.parametrize(("name", "run"), [*IN_TURN, *MORE, *exhaustive(*OTHERS)])
def test_the_padded_runs_losses_and_weights(tmp_path, name, run):
    accumulation, batch_size, strategy, multiple, coefficient = run
    padded, packed = pair(
        tmp_path, name=name, strategy=strategy, gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch_size, pad_to_multiple_of=multiple, router_aux_loss_coef=coefficient,
    )  # fmt: skip
    assert padded.aux_loss_enabled and packed.aux_loss_enabled
    assert_trajectory(losses(packed), losses(padded))
    assert_trajectory(logged(packed, "aux_loss"), logged(padded, "aux_loss"))
    assert_weights(weights(packed), weights(padded), steps=len(losses(padded)))
    assert_trajectory([packed.evaluate()["eval_loss"]], [padded.evaluate()["eval_loss"]])
    if run == RUNS[0]:
        assert max(logged(packed, "micro_batches")) < 8 and packed.packing_plan["micro_batches_per_step"] < 8


@pytest.mark.parametrize("without", ["padded micro-batches", "padding left out"])
def test_negative_control_the_loss_of_what_runs_together_is_another(tmp_path, monkeypatch, without):
    options = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 1, "router_aux_loss_coef": 1.0}
    if without == "padding left out":
        options |= {"pad_to_multiple_of": 64, "strategy": "minibatch"}

    def as_trl(self, model, inputs):  # every token of the packed micro-batch, pads too
        inputs.pop("origins", None)
        return model

    monkeypatch.setattr(PaddedTerms, "wrap", as_trl)
    monkeypatch.setattr(PaddedTerms, "find_routers", lambda self, has_own_head: True)
    padded, packed = pair(tmp_path, **options)
    assert_another_run(losses(packed), losses(padded))


def test_lora_trains_experts_as_padded(tmp_path):
    """TRL's loss of a PEFT model, gradient checkpointing, bfloat16 autocast against its padded self."""
    options = {**PLAIN, "gradient_accumulation_steps": 3, "gradient_checkpointing": True, "router_aux_loss_coef": 1.0}
    ours = arguments(out=tmp_path, check_packing=False, **options)
    common = {"train_dataset": dataset(), "processing_class": tiny.tokenizer()}
    padded = SFTTrainer(small_model("qwen3_moe", num_hidden_layers=2), arguments(SFTConfig, tmp_path, **options),
                        peft_config=lora_config(), **common)  # fmt: skip
    packed = packed_trainer(ours, model=small_model("qwen3_moe", num_hidden_layers=2))
    padded.train(), packed.train()
    assert_trajectory(losses(packed), losses(padded))
    assert_trajectory(logged(packed, "aux_loss"), logged(padded, "aux_loss"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=24), st.integers(1, 4),
       st.integers(0, 100))  # fmt: skip
def test_documents_of_a_group_run_in_one_round_within_the_budget(sizes, world, more):
    sizes = sizes[: len(sizes) // world * world] or [[1]] * world
    lengths = np.array([n for group in sizes for n in group])
    groups = np.repeat(np.arange(len(sizes)), [len(group) for group in sizes])
    budget = max(map(sum, sizes)) + more
    dealt = recut_over_ranks(lengths, budget=budget, world_size=world, quadratic=1e-3, groups=groups)
    assert sorted(i for rank in dealt for part in rank for i in part) == list(range(len(lengths)))
    assert len({len(rank) for rank in dealt}) == 1 and len(dealt[0]) <= max(-(-len(sizes) // world), 1)
    assert all(lengths[part].sum() <= budget and part == sorted(part) for rank in dealt for part in rank)
    rounds = [{int(groups[i]) for rank in dealt for i in rank[r]} for r in range(len(dealt[0]))]
    assert sum(map(len, rounds)) == len(sizes), "no group runs in two rounds"


def one_step(tmp_path, name, **options):
    """The auxiliary loss that a packed step logs, and the model's own of its documents as a padded batch."""
    args = arguments(out=tmp_path, use_peft=False, check_packing=False, **{**PLAIN, "max_steps": 1, **options})
    model = small_model(name, num_hidden_layers=2)
    trainer = packed_trainer(args, model=small_model(name, num_hidden_layers=2), peft_config=None)
    batches = batches_of(trainer)
    trainer.train()
    (batch,) = batches
    layout = batch["packed_layout"]
    documents = layout.split(batch["input_ids"])[: -1 if layout.padding else None]
    ids = torch.nn.utils.rnn.pad_sequence([document.flatten() for document in documents], True, -1)
    with torch.no_grad():
        own = model(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long(), output_router_logits=True)
    return logged(trainer, "aux_loss"), [float(own.aux_loss)], len(documents)


def test_rows_balance_their_true_tokens(tmp_path):
    """A row replaces no padded micro-batch: its loss is that of its documents as a batch."""
    options = {"packing_strategy": "bfd", "per_device_train_batch_size": 1, "pad_to_multiple_of": 64}
    ours, own, count = one_step(tmp_path, "mixtral", **options)
    assert count > 1
    assert_trajectory(ours, own)


@pytest.mark.parametrize("name", ["granitemoe", "phimoe"])
def test_types_whose_loss_trl_cannot_compute_are_trained_with_their_own(tmp_path, name):
    """TRL 1.16 asks their configs for `num_experts`, which transformers calls otherwise there."""
    with pytest.raises(AttributeError, match="num_experts"):
        trained(SFTTrainer, arguments(SFTConfig, tmp_path, max_steps=1), name=name)
    ours, own, count = one_step(tmp_path, name, pad_to_multiple_of=64)
    assert count == 4
    assert_trajectory(ours, own)


@pytest.mark.parametrize("name", ["granitemoe", "phimoe", "deepseek_v4"])
def test_packed_and_padded_calls_give_the_models_own_auxiliary_loss(name):
    """On levels interface and document."""
    model = small_model(name, num_hidden_layers=2)
    documents = tiny.documents((13, 5, 29))
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = (torch.arange(29) < torch.tensor([[13], [5], [29]])).long()
    own = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    patch(model)
    count = model.config.num_experts_per_tok
    batch = tiny.batch(documents, pad_to_multiple_of=16)
    groups = torch.cat([torch.zeros(47, dtype=torch.long), torch.ones(1, dtype=torch.long)])
    packed = BalancedModel(model, groups, (47,), experts_per_token=count)(**batch)
    assert_float32(packed.aux_loss, own)
    balanced = BalancedModel(model, 1 - mask.flatten(), (47,), experts_per_token=count)
    padded = balanced(input_ids=ids, attention_mask=mask)
    assert_float32(padded.aux_loss, own)


def test_a_budget_that_would_tear_a_padded_micro_batch_is_refused(tmp_path):
    args = arguments(out=tmp_path, use_peft=False, max_tokens_per_microbatch=100)
    with pytest.raises(InvalidConfig, match=r"max_tokens_per_microbatch=100 is smaller than a padded micro-batch of 4 "
                       r"examples, which may hold \d+ tokens(.|\n)*router_aux_loss_coef=0\.0"):  # fmt: skip
        packed_trainer(args, model=small_model("mixtral", num_hidden_layers=2), peft_config=None)
    free = arguments(out=tmp_path, use_peft=False, max_tokens_per_microbatch=100, router_aux_loss_coef=0.0)
    packed_trainer(free, model=small_model("mixtral", num_hidden_layers=2), peft_config=None)


def test_routers_that_choose_otherwise_are_refused_at_construction(tmp_path):
    """Doge's choose a row and a column of experts."""
    with pytest.raises(UnsupportedModel, match=r"router logits of shape \(2, 4, 4\)(.|\n)*router_aux_loss_coef=0\.0"):
        packed_trainer(arguments(out=tmp_path), model=small_model("doge", num_hidden_layers=2, is_moe=True))


def test_a_model_without_experts_has_no_auxiliary_loss(tmp_path):
    """Doge's config has a coefficient whether there are experts or not; TRL stops at the first step."""
    args = arguments(out=tmp_path, max_steps=1, check_packing=False)
    trainer = packed_trainer(args, model=small_model("doge", num_hidden_layers=2))
    trainer.train()
    assert not trainer.aux_loss_enabled and len(losses(trainer)) == 1
