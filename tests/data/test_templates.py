"""Chat templates: `train` and `plan` say which parts are left out, and name conversations that do not render."""

import json

import pytest
import tiny
from datasets import Dataset, IterableDataset
from training import arguments, packed_trainer
from trl_trainers import ALL_PACKED, classifier

import trl_packfa
from trl_packfa.cli.main import main
from trl_packfa.data.templates import holds_conversations, left_out_by_template, rendered
from trl_packfa.errors import InvalidDataset

TOOL = {"type": "function", "function": {"name": "add", "description": "1 2", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "1"}}}


def knows(*, tools=False, calls=False):
    """A tokenizer whose template knows so much."""
    made = tiny.tokenizer(["tools", "call"])
    made.chat_template = (
        ("{% if tools %}{{ 'tools ' }}{% endif %}" if tools else "")
        + "{% for m in messages %}{{ m['role'] + ' ' + (m['content'] or '') + ' ' }}"
        + ("{% if m['tool_calls'] %}{{ 'call ' }}{% endif %}" if calls else "")
        + "{% endfor %}"
    )
    return made


def conversations(*, prompt=False):
    """Four of eight with tools, two of them with a call."""
    rows = []
    for i in range(8):
        user = {"role": "user", "content": tiny.words(3, seed=i), "tool_calls": None}
        answer = {"role": "assistant", "content": "7 8", "tool_calls": None}
        if i % 4 == 0:
            answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        messages = {"prompt": [user], "completion": [answer]} if prompt else {"messages": [user, answer]}
        rows.append({**messages, "tools": json.dumps([TOOL]) if i % 2 == 0 else None})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("prompt", [False, True], ids=["messages", "prompt-completion"])
@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize(("template", "expected"), [
    (knows(), ["ignores tools: in 50% of the examples (4 of 8 ", "ignores tool calls: in 25% of the"]),
    (knows(tools=True), ["ignores tool calls: in 25%"]),
    (knows(calls=True), ["ignores tools: in 50%"]),
    (knows(tools=True, calls=True), []),
], ids=["neither", "tools", "calls", "both"])  # fmt: skip
def test_what_the_template_leaves_out_is_counted(template, expected, streaming, prompt):
    data = conversations(prompt=prompt)
    found = left_out_by_template(data.to_iterable_dataset() if streaming else data, template)
    assert len(found) == len(expected)
    assert all(part in sentence for part, sentence in zip(expected, found, strict=True))


def test_other_formats_have_nothing_to_leave_out_and_messages_of_another_format_are_read_unchanged():
    for row in ({"text": "1 2"}, {"prompt": "1", "completion": "2"}, {"input_ids": [5, 6]}):
        assert left_out_by_template(Dataset.from_list([row]), knows()) == []
    old = {"conversations": [{"from": "user", "value": "1"}, {"from": "assistant", "value": "2"}]}
    stream = IterableDataset.from_generator(lambda: iter([old]))
    assert holds_conversations(stream) and left_out_by_template(stream, knows()) == []
    assert old["conversations"][0] == {"from": "user", "value": "1"}
    with_tools = Dataset.from_list([{**old, "tools": [TOOL]}])
    assert "100% of the examples (1 of 1" in left_out_by_template(with_tools, knows())[0]
    old["conversations"] = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
    (line,) = left_out_by_template(Dataset.from_list([old]), knows())
    assert "Rename the roles: 'human' to 'user', 'gpt' to 'assistant'" in line


STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
ASKED, ANSWERED = ({"role": role, "content": "7 8"} for role in ("user", "assistant"))


def in_rows(kind, odd):
    """Return conversations of a trainer's format, of which the third begins as `odd`."""
    begins = [[ASKED], [ASKED], odd, [ASKED], [ASKED]]
    if kind == "sft":
        return [{"messages": [*begin, ANSWERED]} for begin in begins]
    if kind == "kto":
        return [{"prompt": begin, "completion": [ANSWERED], "label": i % 2 == 0} for i, begin in enumerate(begins)]
    return [{"prompt": begin, "chosen": [ANSWERED], "rejected": [ANSWERED]} for begin in begins]


@pytest.mark.parametrize("stream", [False, True], ids=["dataset", "stream"])
@pytest.mark.parametrize("kind", ALL_PACKED)
def test_a_conversation_that_the_template_refuses_is_named(kind, stream, tmp_path):
    def build_on(odd):
        trainer, config = (getattr(trl_packfa, ALL_PACKED[kind] + what) for what in ("Trainer", "Config"))
        model = classifier() if kind == "reward" else tiny.model(layers=1)
        tokenizer, data = tiny.tokenizer(), Dataset.from_list(in_rows(kind, odd))
        tokenizer.chat_template = STRICT
        args = arguments(config, tmp_path, use_peft=True, check_packing=False, max_steps=2)
        data = data.to_iterable_dataset() if stream else data
        return trainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    said = r"conversation 2 of the train dataset .* its roles are assistant(.|\n)*must alternate(.|\n)*filter it out"
    with pytest.raises(InvalidDataset, match=said):
        build_on([ANSWERED]).train()
    build_on([ASKED])


@pytest.mark.parametrize("messages, why", [
    ([], "'messages' holds no message"),
    ([{"content": "7"}], "a message has no 'role'"),
    ([ASKED], "no message has the role 'assistant'"),
])  # fmt: skip
def test_what_is_wrong_with_a_conversation(messages, why):
    with pytest.raises(InvalidDataset, match=f"conversation 5 of the train dataset(.|\n)*{why}"):
        rendered({"messages": messages}, 5, name="train", tokenizer=tiny.tokenizer(), assistant=True)
    assert rendered({"messages": [ASKED, ANSWERED]}, 5, name="train", tokenizer=tiny.tokenizer(), assistant=True) == {}
    assert rendered({"text": "7"}, 5, name="train", tokenizer=tiny.tokenizer()) == {}


def test_the_trainer_and_the_plan_say_so(tmp_path, caplog, capsys):
    data = conversations()
    for tokenizer, silent in ((knows(), False), (knows(tools=True, calls=True), True)):
        caplog.clear()
        packed_trainer(arguments(out=tmp_path), train_dataset=data, processing_class=tokenizer)
        assert ("train: the chat template ignores tools" in caplog.text) is not silent
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        data.to_json(tmp_path / "data.jsonl")
        assert main(f"plan --tokenizer {tmp_path}/tokenizer --dataset_name {tmp_path}/data.jsonl".split()) == 0
        assert ("the chat template ignores tools" in " ".join(capsys.readouterr().out.split())) is not silent
