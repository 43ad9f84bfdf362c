"""The benchmark: that it counts truly, refuses what is not comparable, and concludes no more than the steps allow."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import tiny
import training
from datasets import Dataset
from tolerance import assert_trajectory
from training import LENGTHS

from trl_packfa import PackedSFTConfig
from trl_packfa.bench import process
from trl_packfa.bench.arguments import read_arguments
from trl_packfa.bench.compare import FEWEST_STEPS, Result
from trl_packfa.bench.data import every_length, facts, random_documents, read_documents, save_documents
from trl_packfa.bench.measuring import StepCounter
from trl_packfa.bench.process import FINISH, STEP, SideFailed, SideProcess, leaks, run
from trl_packfa.bench.sides import KINDS, Side, build_trainer, parse_sides
from trl_packfa.cli.main import main
from trl_packfa.errors import InvalidConfig, InvalidDataset

FOUR_TWICE = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"


def built(name, preset, **options):
    """The trainer of a side on random documents."""
    from transformers import AutoTokenizer

    side = parse_sides(name)[0]
    args = training.arguments(PackedSFTConfig, f"{preset}-out", max_length=64, **options)
    documents = random_documents(LENGTHS, vocab_size=512, seed=0)
    data = {"train_dataset": documents, "processing_class": AutoTokenizer.from_pretrained(preset)}
    return build_trainer(side, args, preset, data), side


def test_sides_are_read_as_they_are_written():
    sides = parse_sides("padding, trl-bfd@2048x1,bfd@64/sdpa,step,step/sdpa")
    assert [side.name for side in sides] == ["padding", "trl-bfd@2048x1", "bfd@64/sdpa", "step", "step/sdpa"]
    assert (sides[1].row, sides[1].rows) == (2048, 1)
    assert parse_sides("trl-bfd", contaminated="trl-bfd")[0].allowed
    backends = [side.backend for side in parse_sides("padding/sdpa,trl-bfd/flash_attention_3")]
    assert backends == ["sdpa", "flash_attention_3"]


@pytest.mark.parametrize(("text", "options", "message"), [
    ("padding,pading", {}, "there is no strategy 'pading'.\nChoose from padding, group_by_length"),
    ("step", {"contaminated": "x"}, "there is no strategy 'x'"),
    ("step@2048", {}, "'step@2048': step has no rows of a fixed length"),
    ("padding/varlen", {}, "'padding/varlen': TRL's own trainer has no attention 'varlen'.\nName one of"),
    ("step/fa2", {}, "there is no attention backend 'fa2'"),
    ("bfd@a", {}, "cannot read the strategy 'bfd@a'"),
    ("step,step", {}, "['step'] more than once"),
    ("", {}, "strategies='': none"),
])  # fmt: skip
def test_sides_that_do_not_exist_are_refused(text, options, message):
    with pytest.raises(ValueError) as error:
        parse_sides(text, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("name", KINDS)
def test_every_strategy_is_the_trainer_that_it_says(name, preset):
    trainer, side = built(name, preset)
    assert type(trainer).__name__ == ("PackedSFTTrainer" if side.kind.ours else "SFTTrainer")
    assert type(trainer).__module__.split(".")[0] == ("trl_packfa" if side.kind.ours else "trl")
    assert {key: getattr(trainer.args, key) for key in side.kind.options} == side.kind.options
    assert not side.kind.ours or trainer.args.strategy == side.kind.strategy
    assert leaks(trainer, side) == (name == "fixed")


def test_rows_that_would_cut_documents_are_refused(preset):
    with pytest.raises(InvalidConfig, match=r"rows of 16 tokens cut documents of up to 31.*\n.*trl-bfd@31 or more"):
        built("trl-bfd@16", preset)
    assert built("fixed@16", preset)[0].args.max_length == 16


def work(name, preset, **options):
    """What the first two steps of a side hold."""
    trainer, _ = built(name, preset, max_steps=2, gradient_accumulation_steps=2, check_packing=False, **options)
    counter, counted = StepCounter(trainer), []
    trainer.log = lambda *args, **kwargs: counted.append(counter.take())
    trainer.train()
    return counted[:2]


def test_the_same_examples_count_the_same_padded_and_packed(preset):
    padded, free, mini = (work(name, preset) for name in ("padding", "padding_free", "minibatch"))
    packed = work("step", preset, max_tokens_per_microbatch=512)
    for a, b, c, d in zip(padded, free, packed, mini, strict=True):
        assert a.tokens == b.tokens == c.tokens == d.tokens == c.computed
        assert a.fingerprint == b.fingerprint == c.fingerprint == d.fingerprint
        assert a.documents == b.documents == c.documents == d.documents == 8
        assert a.computed > a.tokens  # pads are computed, and never counted
    assert padded[0].fingerprint != padded[1].fingerprint
    assert (padded[0].micro_batches, packed[0].micro_batches) == (2, 1)


def test_rows_count_their_true_tokens(preset):
    for name in ("bfd@64x1", "trl-bfd@64x1", "fixed@64x1"):
        for step in work(name, preset):
            assert step.tokens <= step.computed <= 2 * 64
            assert step.micro_batches == 2 and step.documents >= 2


def setup(preset, *argv):
    return read_arguments(["--model", preset, "--output_dir", f"{preset}-out", *argv])


def save(asked, model, folder):
    return save_documents(asked, read_documents(asked), model, folder)


def test_lengths_become_random_documents(preset, lengths_file, tmp_path):
    save(setup(preset, "--lengths", lengths_file, "--eval_documents", "6"), preset, tmp_path)
    train, held_out = (Dataset.load_from_disk(str(tmp_path / name)) for name in ("train", "eval"))
    counted = facts(train)
    assert (counted.documents, counted.tokens, len(held_out)) == (len(LENGTHS) - 6, sum(LENGTHS[:-6]), 6)
    assert counted.tokens_seen_by_token == pytest.approx(sum(n * n for n in LENGTHS[:-6]) / sum(LENGTHS[:-6]))
    assert train[0]["input_ids"] == train[0]["labels"] and len(set(train[1]["input_ids"])) > 5


def test_a_dataset_is_tokenized_and_cut_once(tmp_path):
    model, data = tiny.save(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, training.rows(24))))
    asked = setup(model, "--dataset", str(data), "--max_length", "32", "--eval_documents", "4")
    report = save(asked, model, tmp_path)
    train = Dataset.load_from_disk(str(tmp_path / "train"))
    assert facts(train).longest <= 32 and report["train"]["tokens_lost"] > 0
    assert train.column_names == ["input_ids", "labels"] and -100 in train[0]["labels"]


@pytest.mark.parametrize("recipe", ["paper", "llama3_8b", "automodel", "qlora_8b"])
def test_the_recipes_for_a_gpu_are_read(recipe, tmp_path):
    """Equal work on every side, five timed steps or more of sides that are compared, documents that fit the rows."""
    path = Path(__file__).parents[2] / "recipes" / "bench" / f"{recipe}.yaml"
    asked = read_arguments(["--config", str(path), "--output_dir", str(tmp_path), "--load_in_4bit", "false"])
    base = next((side for side in asked.sides if side.name == asked.bench.base), asked.sides[0])
    compared = len(asked.sides) > 1
    assert base.kind.ours != compared and "step" in [side.name for side in asked.sides]
    assert asked.args.max_steps >= (FEWEST_STEPS if compared else 3) and asked.args.max_length == 4096
    assert all((side.row or 4096) >= 4096 and side.rows in (None, 1) for side in asked.sides)
    assert len(every_length(asked.bench.lengths, seed=0)) == 20_000


def test_too_little_data_is_refused(preset, tmp_path):
    (tmp_path / "few.json").write_text("[5, 6, 7]")
    with pytest.raises(InvalidDataset, match="3 documents, 1 held out: less than the 4 of one step"):
        few = ("--per_device_train_batch_size", "4", "--eval_documents", "1")
        read_documents(setup(preset, "--lengths", str(tmp_path / "few.json"), *few))


@pytest.mark.parametrize(("argv", "message"), [
    ([], "no model"),
    (["--model", "tiny", "--max_steps", "0"], "max_steps=0: nothing to time"),
    (["--model", "tiny", "--untimed_steps", "0"], "untimed_steps=0: a side's first step is never typical"),
    (["--model", "tiny", "--base", "bfd"], "base='bfd' is no side.\nChoose from padding, step."),
    (["--model", "tiny", "--packing_strategy", "bfd"], "packing_strategy='bfd': a benchmark has many"),
    (["--model", "tiny", "--learning_speed", "1"], "learning_speed"),
    (["--model", "tiny"], "no data"),
    (["--model", "tiny", "--lengths", "/nowhere.json"], "cannot read lengths from /nowhere.json"),
])  # fmt: skip
def test_wrong_arguments_are_one_message(argv, message, capsys):
    assert main(["bench", *argv]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert "making" not in captured.out + captured.err, "nothing is made for a run that cannot be"


def test_data_that_ends_before_the_clock_runs_is_a_failure():
    one = Result(Side("step"), untimed=2)
    one.stepped({"seconds": 1.0}, max_steps=10)
    one.stepped(None, max_steps=10)
    assert "the data lasts for 1 steps, none of them timed" in one.failure


def side_process(tmp_path):
    return closing(SideProcess([], Side("step"), "", tmp_path, log=tmp_path / "side.log"))


def test_a_process_that_is_killed_leaves_its_reason(tmp_path):
    with side_process(tmp_path) as side:
        side._process.kill()
        with pytest.raises(SideFailed, match="killed by the system, most likely for its memory"):
            side.answer()


def test_a_process_that_ends_leaves_its_error_and_its_log(tmp_path):
    with side_process(tmp_path) as side:
        with pytest.raises(SideFailed, match=r"^InvalidConfig: no model"):
            side.answer()
        with pytest.raises(SideFailed, match=r"died with exit code 1: .*no model"):
            side.ask(STEP)


class Commands:
    """The channel of a worker, whose commands are known; each but the last has to be answered."""

    def __init__(self, *commands):
        self.left, self.answers, self.open = list(commands), [], False

    def recv(self):
        assert not self.open, "a command was taken and never answered"
        self.open = True
        return self.left.pop(0)

    def send(self, answer):
        self.open = False
        self.answers.append(answer)


def test_every_command_is_answered_when_the_epoch_is_over(preset, lengths_file, tmp_path):
    """Two steps of data: the third `step` finds none, and nothing is traced."""
    argv = f"--model {preset} --lengths {lengths_file} --eval_documents {len(LENGTHS) - 16} --max_steps -1"
    argv = f"{argv} --num_train_epochs 1 --output_dir {tmp_path / 'out'} {FOUR_TWICE}".split()
    save(read_arguments(argv), preset, tmp_path)
    channel = Commands(STEP, STEP, STEP, FINISH)
    run(argv, Side("padding"), preset, tmp_path, channel)
    ready, one, two, *none, done = channel.answers
    assert "leaks" in ready and "loss" in one.keys() & two.keys() and none == [None] and "eval_loss" in done
    assert done["trace"] == {}


def test_without_a_trace_the_last_step_ends_the_training(preset, lengths_file, tmp_path, monkeypatch):
    """And the peak memory is that of the timed steps: it is counted anew after the untimed one, not before."""
    argv = f"--model {preset} --lengths {lengths_file} --eval_documents 8 --max_steps 2 --untimed_steps 1"
    argv = f"{argv} --trace false --output_dir {tmp_path / 'out'} {FOUR_TWICE}".split()
    save(read_arguments(argv), preset, tmp_path)
    channel, resets = Commands(STEP, STEP, STEP, FINISH), []
    monkeypatch.setattr(process, "start_trace", lambda: pytest.fail("traced"))
    monkeypatch.setattr(process, "reset_peak", lambda: resets.append(len(channel.answers)))
    run(argv, Side("padding"), preset, tmp_path, channel)
    assert [set(answer) >= {"tokens", "seconds"} for answer in channel.answers] == [False, True, True, True, False]
    assert channel.answers[-1]["trace"] == {} and not channel.left and resets == [2]


@pytest.mark.slow
def test_sides_run_interleaved_and_one_that_fails_is_a_row(lengths_file, tmp_path, capsys):
    """The whole command; `bfd@8` has no room for the documents and says so."""
    output = tmp_path / "bench.json"
    argv = f"bench --model tiny --lengths {lengths_file} --strategies padding,step,bfd@8 --max_steps 2 {FOUR_TWICE}"
    argv += " --untimed_steps 1 --eval_documents 8 --gradient_checkpointing false --lora_dropout 0"
    argv += f" --output {output} --output_dir {tmp_path / 'out'}"
    assert main(argv.split()) == 1
    said = capsys.readouterr().out
    assert "bfd@8 failed: InvalidConfig: rows of 8 tokens cut documents of up to 31" in said
    assert "step: too short to conclude" in said or "was busy" in said
    report = json.loads(output.read_text())
    padding, step, failed = report["sides"]
    assert set(failed) == {"side", "trainer", "failed"}
    assert padding["tokens_per_step"] == step["tokens_per_step"] and step["fill"] == 1.0 > padding["fill"]
    assert_trajectory(*([side["final_loss"], side["validation_loss"]] for side in (step, padding)))
    assert padding["equal"] == step["equal"] and step["peak_bytes"] > 0 and step["host_syncs_per_micro_batch"] > 0
    assert report["environment"]["versions"]["torch"] and report["environment"]["allocator"]
    head, *steps = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    assert head["environment"] == report["environment"]
    assert [step["timed"] for step in steps] == [False] * 2 + [True] * 4
    assert [step["tokens"] for step in steps if step["side"] == "step"][1:] == [s["tokens"] for s in step["steps"]]


@pytest.mark.slow
def test_an_adapter_that_fits_nothing_is_a_row_too(preset, lengths_file, tmp_path, capsys):
    """PEFT refuses it in every side, and would where the model's FLOPs are counted."""
    argv = f"bench --model {preset} --lengths {lengths_file} --strategies step --eval_documents 8"
    assert main(f"{argv} --lora_target_modules nowhere --output_dir {tmp_path / 'out'}".split()) == 1
    captured = capsys.readouterr()
    assert "lora_target_modules=nowhere matches no layer" in captured.out and "Traceback" not in captured.err
