"""Commands with a user's mistakes end in one message that says what to do, before anything is trained."""

import json
import re

import pytest
import tiny
import vision
from training import FORMATS, built_trainers

from trl_packfa.cli import OWN_PARSERS
from trl_packfa.cli.main import main
from trl_packfa.data import files
from trl_packfa.scripts import train as script

ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--max_steps", "1"]
PAIRS = [{"prompt": "a b ", "chosen": tiny.words(n, seed=n), "rejected": tiny.words(3, seed=n)} for n in range(1, 9)]
DATA = {
    "text": FORMATS["text"],
    "answers": FORMATS["prompt-completion"],
    "chat": FORMATS["messages"],
    "pairs": PAIRS,
    "chat_pairs": [{name: [{"role": "user", "content": text}] for name, text in pair.items()} for pair in PAIRS],
    "alpaca": [{"instruction": "5 6", "input": "7" if n % 2 else None, "output": "8 9"} for n in range(8)],
    "questions": [{"question": "a b", "answer": "d e"} for n in range(8)],
    "empty_chat": [{"messages": []}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models without chat template, without tokenizer and without processor; a file of each kind of data."""
    where = tmp_path_factory.mktemp("mistakes")
    model, tokenizer = tiny.model(layers=1), tiny.tokenizer()
    tokenizer.chat_template = None
    for name in ("base", "no_tokenizer"):
        model.save_pretrained(where / name)
    tokenizer.save_pretrained(where / "base")
    vision.model().save_pretrained(where / "no_processor")
    vision.processor().tokenizer.save_pretrained(where / "no_processor")
    for name, rows in DATA.items():
        (where / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (where / "empty.jsonl").touch()
    (where / "broken.yaml").write_text("a: [1\n b: 2")
    (where / "typo.yaml").write_text("lerning_rate: 1\n")
    (where / "unquoted.yaml").write_text("save_strategy: no\n")
    (where / "cut.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n')
    (where / "rewards.py").write_text("def brevity(completions, **_):\n    return [-len(c) for c in completions]\n")
    return where


@pytest.fixture(autouse=True)
def _in_the_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def train(data, *more):
    argv = ["train", "--model_name_or_path", "base", "--dataset_name", f"{data}.jsonl", "--output_dir", "out"]
    return main([*argv, *ON_CPU, *more])


GRPO = ["--trainer", "grpo", "--num_generations", "2", "--per_device_train_batch_size", "2"]


@pytest.mark.parametrize(("data", "more", "said"), [
    ("chat", [], r"holds conversations, but the tokenizer has no chat template(.|\n)*chat_template_path"),
    ("chat_pairs", ["--trainer", "dpo"], r"no chat template(.|\n)*Set tokenizer.chat_template"),
    ("chat", ["--chat_template_path", "none.jinja"], r"chat_template_path=none.jinja: there is no such file"),
    ("empty_chat", [], r"has no message in 'messages'"),
    ("text", ["--attn_implementation", "flash_attention_2"], r"cannot run here\.\n  - flash-attn (.|\n)*Drop it"),
    ("text", ["--attn_implementation", "flashy"], r'ValueError of transformers: .*"flashy"` is not supported'),
    ("answers", ["--trainer", "dpo"], r"wanted: 'chosen' and 'rejected'\nFor 'prompt' .*--trainer sft"),
    ("answers", ["--trainer", "reward"], r"wanted: 'chosen' and 'rejected'\nFor 'prompt'"),
    ("answers", ["--trainer", "kto"], r"wanted: 'prompt' and 'completion' and 'label', or 'chosen' and"),
    ("text", ["--trainer", "dpo"], r"columns \['text'\]; PackedDPOTrainer cannot train on them"),
    ("pairs", [], r"To train on pairs, use --trainer dpo or reward"),
    ("text", ["--per_device_train_batch_size", "0"], r"per_device_train_batch_size=0: it must be 1 or more"),
    ("text", ["--per_device_eval_batch_size", "-1"], r"per_device_eval_batch_size=-1: it must be 1 or more"),
    ("text", ["--gradient_accumulation_steps", "0"], r"gradient_accumulation_steps=0: it must be 1 or more"),
    ("text", ["--dataloader_num_workers", "-1"], r"dataloader_num_workers=-1: it must be 0 or more"),
    ("text", ["--lora_r", "0"], r"lora_r=0: it must be 1 or more"),
    ("text", ["--max_steps", "0"], r"max_steps=0, num_train_epochs=3.0: nothing would be trained"),
    ("text", ["--max_steps", "-1", "--num_train_epochs", "0"], r"num_train_epochs=0.0: nothing would be trained"),
    ("text", ["--lora_target_modules", "query", "key"],
     r"\['query', 'key'\] matches no layer(.|\n)*down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ("pairs", ["--trainer", "dpo", "--lora_target_modules", "query"], r"matches no layer(.|\n)*q_proj"),
    ("text", ["--push_to_hub", "true"], r"push_to_hub=True, but nothing can be pushed(.|\n)*`hf auth login`"),
    ("text", ["--eos_token", "<nope>"], r"ValueError of trl: .*`eos_token` \('<nope>'\)(.|\n)*--debug"),
    # The first without the package, the second with it.
    ("text", ["--deepspeed", "none.json"], r"deepspeed>=0.9.3|existing deepspeed config(.|\n)*none.json"),
    ("text", ["--config", "broken.yaml"], r"broken.yaml is no YAML: (.|\n)*line 2"),
    ("cut", [], r'line 3 is no JSON(.|\n)*{"text": "b"'),
    *(("text", ["--model_name_or_path", folder],
       rf"cannot load a tokenizer or processor from '{folder}'(.|\n)*copy the missing files into the folder")
      for folder in ("no_tokenizer", "no_processor")),
    ("text", ["--config", "brokn.yaml"], r"cannot read brokn.yaml(.|\n)*no such file; did you mean broken.yaml\?"),
    ("text", ["--config", "typo.yaml"], r"lerning_rate(.|\n)*Did you mean learning_rate"),
    ("text", ["--lerning_rate", "1"], r"lerning_rate(.|\n)*Did you mean learning_rate"),
    ("text", ["--learning_speed", "1"], r"learning_speed"),
    ("text", ["--dataset_name", "rewards.py"], r"cannot tell the format of"),
    ("text", ["--eval_strategy", "epoch"], r"the dataset has no split \['test'\], only \['train'\]"),
    ("empty", [], r"empty.jsonl' is empty"),
    ("alpaca", [], r"Pass --columns 'prompt={instruction}\\n{input}\\n' 'completion={output}' to"),
    ("questions", [], r'dataset.map\(lambda row: {"prompt": "{question}\\n".format\(\*\*row\), "completion"'),
    ("alpaca", ["--columns", "prompt={insruction}", "completion={output}"], r"no column 'insruction'"),
    ("alpaca", ["--columns", "prompt={", "completion={output}"], r"Write a brace that is text twice"),
    ("alpaca", ["--columns", "prompt"], r"a template is NAME=TEMPLATE"),
    ("text", ["--test_split_size", "0.2"], r"holds documents out, but eval_strategy='no' never evaluates them"),
    ("text", ["--test_split_size", "99", "--eval_strategy", "epoch"], r"test_split_size=99.0 cannot split 24 doc"),
    ("text", ["--test_split_size", "0.2", "--eval_strategy", "epoch", "--dataset_streaming", "true"],
     r"test_split_size=0.2 cannot split a stream"),
    ("pairs", ["--trainer", "dpo", "--preview", "true"], r"only --trainer sft has"),
    ("answers", GRPO, r"no reward is named(.|\n)*--reward_funcs MODULE.FUNCTION"),
    ("answers", [*GRPO, "--reward_funcs", "brevity"], r"no reward function 'brevity'(.|\n)*accuracy_reward"),
    ("answers", [*GRPO, "--reward_funcs", "rewards.none"], r"cannot import 'rewards.none'(.|\n)*no attribute"),
    ("answers", [*GRPO, "--reward_funcs", "nowhere.none"], r"cannot import 'nowhere.none'(.|\n)*No module named"),
    ("text", [*GRPO, "--reward_funcs", "rewards.brevity"], r"wanted: 'prompt'"),
    ("answers", [*GRPO, "--reward_funcs", "rewards.brevity", "--dataset_streaming", "true"],
     r"train dataset is a stream. TRL's GRPOTrainer cannot train on streams"),
])  # fmt: skip
def test_a_mistake_is_one_message(data, more, said, monkeypatch, capsys):
    monkeypatch.setattr("trl_packfa.trainers.requirements.runs.is_flash_attn_2_available", lambda: False)
    assert train(data, *more) == 1
    error = capsys.readouterr().err
    assert re.search(said, error) and "Traceback" not in error


@pytest.mark.parametrize(("argv", "said"), [
    (["--model_name_or_path", "../basee"], r"there is no such folder\n"),
    (["--model_name_or_path", "./bas"], r"there is no such folder; did you mean base\?"),
    (["--model_name_or_path", "a/b/c"], r"there is no such folder\n"),
    (["--model_name_or_path", "owner/name"], r"there is no such folder, and as a name on the Hub: "),
    (["--dataset_name", "./texts.jsonl"], r"there is no such file; did you mean text.jsonl\?"),
    (["--dataset_name", "/none/data"], r"there is no such folder\n"),
])  # fmt: skip
def test_a_path_that_leads_nowhere_is_called_so(argv, said, capsys, monkeypatch):
    if argv[0] == "--dataset_name":  # datasets would ask the Hub for it, five times without a network
        monkeypatch.setattr(files, "load_dataset", None)
    assert train("text", *argv) == 1
    error = capsys.readouterr().err
    assert re.search(said, error) and "Repo id" not in error
    if argv[0] == "--model_name_or_path":
        assert main(["check", argv[1]]) == 1 and re.search(said, capsys.readouterr().err)


def test_a_dataset_whose_name_ends_like_a_file_is_looked_for_on_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(files, "load_dataset", lambda path, **options: asked.append(path))
    files.load_dataset_dict("owner/data.jsonl")
    assert asked == ["owner/data.jsonl"]


@pytest.mark.parametrize(("argv", "said"), [
    (["check", "base", "--adapter", "./none"], "there is no adapter in './none'.\n  - there is no such folder\n"),
    (["check", "base", "--backend", "fa2"], "NoBackend: there is no attention backend 'fa2'"),
    (["train", "--config", "unquoted.yaml", "--output_dir", "out"],
     'YAML reads an unquoted no or yes as a truth value. Write save_strategy: "no".'),
    (["train", *ON_CPU, "--output_dir", "out", "--dataset_name", "text.jsonl"], "InvalidConfig: no model is named"),
    (["train", *ON_CPU, "--output_dir", "out", "--model_name_or_path", "base"], "InvalidConfig: no dataset is named"),
])  # fmt: skip
def test_what_is_missing_or_not_quoted_is_one_message(argv, said, capsys):
    assert main(argv) == 1
    assert said in capsys.readouterr().err


def test_a_fault_of_the_code_keeps_its_traceback(monkeypatch):
    """Not what a library refuses, even if it is a ValueError: a report of it needs the place."""

    def fails(_):
        raise ValueError("a fault")

    monkeypatch.setitem(OWN_PARSERS, "train", fails)
    with pytest.raises(ValueError, match="a fault"):
        main(["train"])


def test_the_suggested_columns_train(monkeypatch, capsys):
    """As they are printed, and a missing input is empty text."""
    assert train("alpaca") == 1
    words = re.findall(r"'([^']*=[^']*)'", capsys.readouterr().err)
    assert words == [r"prompt={instruction}\n{input}\n", "completion={output}"]
    trainers = built_trainers(monkeypatch)
    assert train("alpaca", "--columns", *words, "--check_packing", "false", "--preview", "true") == 0
    decoded = [trainers[0]._tokenizer.decode(ids) for ids in trainers[0].train_dataset["input_ids"]]
    assert [text.split() for text in decoded[:2]] == ["5 6 8 9 </s>".split(), "5 6 7 8 9 </s>".split()]
    assert "document 1, 6 tokens, 3 trained:  5 6 7 [[8 9 </s>]]" in capsys.readouterr().out


def test_interrupted_it_says_how_to_go_on_and_begun_again_what_is_there(tmp_path, monkeypatch, capsys):
    class Interrupted(script.PackedSFTTrainer):
        def log(self, logs, start_time=None):
            if self.state.global_step == stops_at:
                raise KeyboardInterrupt
            super().log(logs, start_time)

    monkeypatch.setattr(script, "SFT", script.Kind(Interrupted, script.PackedSFTConfig))
    out = ["--output_dir", str(tmp_path), "--check_packing", "false", "--max_steps", "4", "--logging_steps", "1"]
    out += ["--save_strategy", "steps", "--save_steps", "2"]
    stops_at = 1
    assert train("text", *out) == 130
    assert "interrupted\nNo checkpoint was saved in" in capsys.readouterr().err
    stops_at = 3
    assert train("text", *out) == 130
    said = capsys.readouterr()
    assert "earlier run" not in said.out, "none was saved"
    assert re.search(r"checkpoint-2 is saved in .* with --resume_from_checkpoint last\.\n", said.err)
    stops_at = 0
    assert train("text", *out, "--resume_from_checkpoint", "last") == 0
    said = capsys.readouterr().out
    assert "resuming from checkpoint-2" in said and "starts from zero" not in said
    assert train("text", *out) == 0
    said = capsys.readouterr().out
    assert re.match(r".* has checkpoints of an earlier run, the last is checkpoint-4. This run starts from zero", said)


def test_a_share_of_one_file_is_evaluated(tmp_path, monkeypatch, capsys):
    held_out = ["--test_split_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "1", "--max_steps", "2"]
    trainers = built_trainers(monkeypatch)
    for _ in range(2):
        assert train("text", *held_out, "--output_dir", str(tmp_path), "--check_packing", "false") == 0
    assert re.search(r"step 2/2  eval loss \d", capsys.readouterr().out)
    first, second = (
        [sorted(map(tuple, data["input_ids"])) for data in (trainer.train_dataset, trainer.eval_dataset)]
        for trainer in trainers
    )
    assert first == second and [len(part) for part in first] == [18, 6]
    assert not set(first[0]) & set(first[1])


def test_against_a_reward_by_its_dotted_name(tmp_path, monkeypatch, capsys):
    trainers = built_trainers(monkeypatch)
    argv = [*GRPO, "--reward_funcs", "rewards.brevity", "--max_completion_length", "4", "--output_dir", str(tmp_path)]
    argv += ["--save_strategy", "steps", "--save_steps", "1"]
    assert train("answers", *argv) == 0
    said = capsys.readouterr().out
    assert re.search(r"step 1/1  loss .*reward -\d.*completions/mean_length .*tokens/s", said)
    logged = next(entry for entry in trainers[0].state.log_history if "loss" in entry)
    assert {"reward", "rewards/brevity/mean", "padding_saved", "tokens_per_second"} <= logged.keys()
    assert type(trainers[0]).__name__ == "GRPOTrainer" and (tmp_path / "adapter_config.json").exists()
    assert train("answers", *argv, "--resume_from_checkpoint", "last", "--max_steps", "2") == 0
    assert "resuming from checkpoint-1 at step 1" in capsys.readouterr().out


def test_what_cannot_be_pushed_in_the_end_is_saved(tmp_path, capsys):
    """A network that fails after the training."""

    class Trainer:
        args, hub_model_id = script.PackedSFTConfig(str(tmp_path), use_cpu=True, bf16=False), "me/mine"

        def push_to_hub(self, dataset_name):
            raise ConnectionError("no network")

    with pytest.raises(script.InvalidConfig, match=r"trained and saved in (.|\n)*no network\n.*hf upload me/mine"):
        script._push(Trainer(), None)
