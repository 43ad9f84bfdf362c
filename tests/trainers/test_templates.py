"""Tools and tool calls that a chat template leaves out are said, by `train` and by `plan`, with their share."""

import json

import pytest
import tiny
from datasets import Dataset
from training import arguments, packed_trainer

from trl_packfa.cli.main import main
from trl_packfa.trainers.common.preflight import left_out_by_template

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


def test_other_formats_have_nothing_to_leave_out():
    for row in ({"text": "1 2"}, {"prompt": "1", "completion": "2"}, {"input_ids": [5, 6]}):
        assert left_out_by_template(Dataset.from_list([row]), knows()) == []
    old = {"conversations": [{"from": "user", "value": "1"}, {"from": "assistant", "value": "2"}], "tools": [TOOL]}
    assert "100% of the examples (1 of 1" in left_out_by_template(Dataset.from_list([old]), knows())[0]


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
