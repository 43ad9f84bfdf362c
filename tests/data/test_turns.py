"""`expand_turns=True` and `share_prefixes=True`: each assistant turn trains as an example of its own, histories run
once."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from selection import in_full
from tolerance import assert_another_run, assert_float32, assert_trajectory
from training import arguments, dataset, lora_config, losses, packed_trainer, rows
from trl import SFTConfig, SFTTrainer

from trl_packfa import DataCollatorForPacking, patch
from trl_packfa.data import collator
from trl_packfa.data.collator import ROW_LENGTHS, SAVED
from trl_packfa.data.dataset import split_example, split_tree
from trl_packfa.data.turns import TurnExpander
from trl_packfa.errors import ContaminationError, InvalidDataset
from trl_packfa.layout import prefix_tree, shared_rows
from trl_packfa.layout.prefix_tree import PrefixTree
from trl_packfa.layout.shared_rows import tree_of
from trl_packfa.patching.state import find_state
from trl_packfa.patching.unpadding import Unpadding

TURNS = 3
# As reasoning models do: only the last turn shows its thoughts.
DROPS_THOUGHTS = (
    "{% for m in messages %}{{ m['role'] + ' ' }}"
    "{% if loop.last and m.get('thoughts') %}{{ m['thoughts'] + ' ' }}{% endif %}{{ m['content'] + ' </s> ' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer(template=DROPS_THOUGHTS):
    made = tiny.tokenizer()
    made.chat_template = template or made.chat_template
    return made


def conversation(seed, turns=TURNS):
    messages = []
    for turn in range(turns):
        asked = tiny.words(12 + (seed + turn) % 9, seed=seed * 10 + turn)
        answer = {"content": tiny.words(4, seed=seed + turn), "thoughts": tiny.words(1 + seed % 5, seed=seed)}
        messages += [{"role": "user", "content": asked, "thoughts": None}, {"role": "assistant", **answer}]
    return messages


def conversations(count=16, **options):
    return Dataset.from_list([{"messages": conversation(i, **options), "source": str(i % 2)} for i in range(count)])


def one_by_one(data):
    """Each assistant turn with its history, as the prompt and the completion of TRL."""
    return Dataset.from_list([
        {"prompt": messages[:i], "completion": [messages[i]]}
        for messages in data["messages"] for i in range(1, len(messages), 2)
    ])  # fmt: skip


def expanded(out, *, model=None, data=None, template=DROPS_THOUGHTS, lora=False, **options):
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, **options}
    args = arguments(out=out, expand_turns=True, use_peft=lora, train_sampling_strategy="sequential", **options)
    return packed_trainer(
        args, model=model or tiny.model(layers=2), processing_class=tokenizer(template),
        peft_config=lora_config() if lora else None, train_dataset=conversations() if data is None else data,
    )  # fmt: skip


def padded(out, *, model=None, data=None, template=DROPS_THOUGHTS, lora=False, batch=TURNS, **options):
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 2, **options}
    args = arguments(SFTConfig, out, train_sampling_strategy="sequential", **options)
    return SFTTrainer(
        model or tiny.model(layers=2), args=args, processing_class=tokenizer(template),
        peft_config=lora_config() if lora else None,
        train_dataset=one_by_one(conversations()) if data is None else data,
    )  # fmt: skip


def trained(trainer):
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(entry["loss"], entry["grad_norm"]) for entry in logs], logs


CASES = [("llama", True, {}),
         *in_full(("qwen3", False, {}), ("gemma2", True, {"use_reentrant": False}),
                  ("llama", False, {"use_reentrant": True}))]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_turns_train_as_one_by_one(case, tmp_path):
    name, lora, checkpointing = case
    options = {"lora": lora, "gradient_checkpointing": bool(checkpointing), "max_steps": 4}
    options["gradient_checkpointing_kwargs"] = checkpointing or None
    torch.manual_seed(0)
    expected, _ = trained(padded(tmp_path, model=tiny.model(name, layers=2), **options))
    torch.manual_seed(0)
    trainer = expanded(tmp_path, model=tiny.model(name, layers=2), **options)
    found, logs = trained(trainer)
    assert_trajectory(found, expected)
    assert all(entry["prefixes_shared"] > 0.3 for entry in logs)
    assert find_state(trainer.model).unpadding.shared > 0 and trainer.check_report.is_exact


@pytest.mark.parametrize("strategy", ["minibatch", "step"])
def test_twenty_steps_beside_trl(strategy, tmp_path):
    data = conversations(48)
    expected, _ = trained(padded(tmp_path, data=one_by_one(data), max_steps=20))
    found, _ = trained(expanded(tmp_path, data=data, max_steps=20, packing_strategy=strategy))
    assert len(found) == 20
    assert_trajectory(found, expected)
    # The control: turns that are trained on the whole conversation, with the thoughts of no earlier turn in between.
    other, _ = trained(padded(tmp_path, data=one_by_one(data), template=None, max_steps=20))
    assert_another_run(other, expected)


@pytest.mark.parametrize("options", [{"packing_strategy": "bfd", "max_length": 96},
                                     {"max_tokens_per_microbatch": 90, "per_device_train_batch_size": 4},
                                     {"bf16": True, "learning_rate": 1e-4}], ids=["bfd", "split", "bf16"])  # fmt: skip
def test_histories_that_run_once_change_nothing(options, tmp_path, monkeypatch):
    found, logs = trained(expanded(tmp_path, max_steps=3, **options))
    monkeypatch.setattr(Unpadding, "shared_documents_of", lambda *args: None)
    expected, _ = trained(expanded(tmp_path, max_steps=3, **options))
    assert_trajectory(found, expected, dtype=torch.bfloat16 if "bf16" in options else torch.float32)
    assert all(entry.get("fill", 0) <= 1 for entry in logs)


def test_a_template_that_keeps_thoughts_gives_ordinary_multi_turn_training(tmp_path):
    data = conversations()
    options = {"max_steps": 4, "learning_rate": 1e-4, "data": data}
    expected, _ = trained(padded(tmp_path, template=None, assistant_only_loss=True, batch=1, **options))
    trainer = expanded(tmp_path, template=None, **options)
    found, _ = trained(trainer)
    assert_trajectory(found, expected)
    first = tokenizer(None).apply_chat_template(data["messages"][0], return_dict=True)["input_ids"]
    row = trainer.train_dataset[0]
    assert len(row["input_ids"]) - row[SAVED] == len(first) == max(row[ROW_LENGTHS])


def test_negative_control_a_prefix_that_is_too_long_is_found(tmp_path, monkeypatch):
    common = prefix_tree.common_length

    def tree(layout, ids):
        with monkeypatch.context() as wrong:
            wrong.setattr(prefix_tree, "common_length", lambda a, b: min(common(a, b) + 8, len(a), len(b)))
            return tree_of(layout, ids)

    monkeypatch.setattr(collator, "tree_of", tree)
    expanded(tmp_path, max_steps=1).train()  # on a CPU it is found anew
    monkeypatch.setattr(shared_rows, "_given_tree", lambda layout, ids: layout.prefix_tree)
    with pytest.raises(ContaminationError, match="first training batch"):
        expanded(tmp_path).train()


def test_rows_that_begin_alike_share_without_turns(tmp_path):
    system = tiny.words(30, seed=5)
    data = Dataset.from_list([{**row, "prompt": f"{system} {row['prompt']}"} for row in rows(12, longest=9)])
    plain, shared = (packed_trainer(arguments(out=tmp_path, use_peft=False, share_prefixes=shares), train_dataset=data,
                                    peft_config=None) for shares in (False, True))  # fmt: skip
    plain.train(), shared.train()
    assert_trajectory(losses(shared), losses(plain))
    assert shared.state.log_history[0]["prefixes_shared"] > 0.5
    assert "prefixes_shared" not in plain.state.log_history[0]


def test_streams_and_evaluation(tmp_path):
    data = conversations(12)
    options = {"max_steps": 3, "max_length": 64}
    expected, _ = trained(expanded(tmp_path, data=data, packing_strategy="minibatch", **options))
    found, _ = trained(expanded(tmp_path, data=data.to_iterable_dataset(), packing_strategy="minibatch", **options))
    assert_trajectory(found, expected)
    found, logs = trained(expanded(tmp_path, data=data.to_iterable_dataset(), packing_strategy="bfd", **options))
    assert all(0 < entry["fill"] <= 1 for entry in logs)
    args = arguments(out=tmp_path, expand_turns=True, use_peft=False, loss_by="source")
    given = {"processing_class": tokenizer(), "train_dataset": data, "eval_dataset": data}
    packed = packed_trainer(args, peft_config=None, **given)
    report = packed.packing_reports["eval"]
    assert report.documents == 36 and report.shared_tokens == sum(packed.eval_dataset[SAVED]) > 0
    one = SFTTrainer(
        tiny.model(layers=2), args=arguments(SFTConfig, tmp_path), processing_class=tokenizer(),
        train_dataset=one_by_one(data), eval_dataset=one_by_one(data),
    )  # fmt: skip
    ours, theirs = (trainer.evaluate()["eval_loss"] for trainer in (packed, one))
    assert abs(ours - theirs) < 1e-2 * theirs  # TRL's mean of batches weighs turns by batch, ours conversations
    assert {"eval_loss/0", "eval_loss/1"} <= set(packed.state.log_history[-1])


def test_turns_that_are_too_long_are_counted(tmp_path):
    trainer = expanded(tmp_path, max_length=48, overflow="drop")
    report = trainer.packing_reports["train"]
    assert report.documents == 16 * TURNS and report.dropped_too_long and report.tokens_lost
    with pytest.raises(InvalidDataset, match="too long"):
        expanded(tmp_path, max_length=48, overflow="error")


def test_a_row_is_split_where_it_is_too_large():
    history = list(range(40))
    documents = [history + [i] * 10 for i in range(41, 46)]
    parts = split_tree(documents, 60)
    assert [numbers for numbers, _ in parts] == [[0, 1], [2, 3], [4]]
    assert [tree.num_tokens for _, tree in parts] == [60, 60, 50]
    assert [numbers for numbers, _ in split_tree(documents, 10)] == [[0], [1], [2], [3], [4]]
    ids = [token for document in documents for token in document]
    example = {"input_ids": ids, "labels": ids, ROW_LENGTHS: [50] * 5, SAVED: 160, "source": "a"}
    assert split_example(example, 90) == [example]
    halves = split_example(example, 60)
    assert [half[SAVED] for half in halves] == [40, 40, 0] and all(half["source"] == "a" for half in halves)
    assert [token for half in halves for token in half["input_ids"]] == ids


def test_a_tree_counts_what_is_computed():
    documents = [np.arange(20), np.arange(30), np.array([*range(20), 7, 7])]
    tree = PrefixTree.of(documents)
    assert (tree.segments, tree.documents) == ((20, 2, 10), ((0,), (0, 2), (0, 1)))
    assert (tree.num_tokens, tree.saved, tree.squares) == (32, 40, 20**2 + 30**2 - 20**2 + 22**2 - 20**2)


def test_packed_rows_share_with_the_collator_and_without():
    torch.manual_seed(0)
    docs = [[*range(20), 21, 22], [*range(20), 31, 32, 33], [5, 6, 7]]
    model = tiny.model(layers=2)
    examples = [{"input_ids": ids} for ids in docs]
    expected = patch(model)(**DataCollatorForPacking()(examples)).logits
    patch(model, unpad=True, share_prefixes=True)
    policy = find_state(model).unpadding
    for shares in (True, False):
        before = policy.shared
        batch = DataCollatorForPacking(share_prefixes=shares)(examples)
        assert_float32(model(**batch).logits, expected)
        assert policy.shared - before == 20
    # Equal ids at other positions are other tokens, and so are ids that come with their kinds.
    ids = torch.tensor([[*docs[0], *docs[1]]])
    positions = torch.cat([torch.arange(22), torch.arange(23) + 3])[None]
    before, layout = policy.shared, batch["packed_layout"].from_lengths([22, 23])
    model(input_ids=ids, position_ids=positions, packed_layout=layout)
    assert policy.shared == before
    model(input_ids=ids, position_ids=layout.position_ids(), packed_layout=replace(layout, memo={}))
    assert policy.shared == before + 20


FOREIGN = [{"from": "human", "value": "7"}, {"from": "gpt", "value": "8"}]
REFUSED = {
    "no conversations": (dataset(4), DROPS_THOUGHTS, "has no conversations in 'messages'"),
    "no turn": (Dataset.from_list([{"messages": conversation(0)}, {"messages": conversation(1)[:1]}]), DROPS_THOUGHTS,
                "conversation 1 has no assistant turn"),
    "other roles": (Dataset.from_list([{"conversations": FOREIGN}] * 4), DROPS_THOUGHTS,
                    r"its roles are human, gpt(.|\n)*'human' to 'user', 'gpt' to 'assistant'"),
    "a history that changes": (None, "{{ messages | length ~ ' ' }}" + DROPS_THOUGHTS,
                               r"conversation 0: .* before turn 1 in another way"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_data_without_turns_of_their_own_is_refused(case, tmp_path):
    data, template, message = REFUSED[case]
    with pytest.raises(InvalidDataset, match=message):
        expanded(tmp_path, data=data, template=template)


@pytest.mark.parametrize("before", ["", "{{ 'system 1 </s> ' }}"], ids=["alone", "after a default"])
def test_an_assistant_that_opens_the_conversation_trains_its_words(before):
    """transformers renders no empty history. The generation prompt is found in the rendered turn."""
    opening = [{"role": "assistant", "content": "8 9"}, *conversation(0, turns=1)]
    data = Dataset.from_list([{"messages": opening}])
    expander = TurnExpander(tokenizer(before + DROPS_THOUGHTS), chat_template=None)
    made = expander.expand(data, name="train", num_proc=None)
    trained = [tokenizer().decode([token for token in labels if token != -100]) for labels in made["labels"]]
    assert trained[0] == "8 9 </s>" and len(trained) == 2 and trained[1].endswith("</s>")
    silent = "{% for m in messages %}{{ m['content'] + ' </s> ' }}{% endfor %}"
    expander = TurnExpander(tokenizer(silent + "{% if add_generation_prompt %}go {% endif %}"), chat_template=None)
    with pytest.raises(InvalidDataset, match="conversation 0: the chat template renders the messages before turn 0"):
        expander.expand(data, name="train", num_proc=None)


def test_tools_and_template_arguments_reach_the_template():
    template = "{{ tools[0]['name'] }} {% if short %}7 {% endif %}" + DROPS_THOUGHTS
    expander = TurnExpander(tokenizer(template), chat_template=None)
    row = {"messages": conversation(0), "tools": '[{"name": "9"}]', "chat_template_kwargs": {"short": True}}
    made = expander.expand(Dataset.from_list([row]), name="train", num_proc=None)
    known = tokenizer()
    assert all(known.decode(ids).startswith("9 7 user") for ids in made["input_ids"]) and len(made) == TURNS
    for ids, labels in zip(made["input_ids"], made["labels"], strict=True):
        assert known.decode([token for token in labels if token != -100]).endswith("</s>")
        assert [a for a, b in zip(ids, labels, strict=True) if b != -100] == [b for b in labels if b != -100]
