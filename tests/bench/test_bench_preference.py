"""`trl-packfa bench --trainer`: TRL's preference trainers as sides, padded and without their pads."""

import json

import numpy as np
import pytest
import tiny
from datasets import Dataset
from selection import one_of_each
from tolerance import assert_trajectory
from training import arguments

from trl_packfa import PackedSFTConfig
from trl_packfa.bench.arguments import read_arguments
from trl_packfa.bench.data import facts
from trl_packfa.bench.preference import PREFERENCES, random_pairs, row_lengths, tokenized
from trl_packfa.cli.main import main
from trl_packfa.errors import InvalidConfig, InvalidDataset

LENGTHS = [9, 21, 14, 5, 30, 8, 17, 12] * 6


def test_a_trainer_has_strategies_of_its_own():
    sides = read_arguments(["--model", "tiny", "--trainer", "dpo"]).sides
    expected = [("padding", "dpo", False), ("padding_free", "dpo", True), ("step", "dpo", True)]
    assert [(side.name, side.trainer, side.kind.ours) for side in sides] == expected
    assert [side.name for side in read_arguments(["--model", "tiny"]).sides] == ["padding", "step"]
    with pytest.raises(InvalidConfig, match=r"no strategy 'bfd' of --trainer dpo.\nChoose from .*, step"):
        read_arguments(["--model", "tiny", "--trainer", "dpo", "--strategies", "padding,bfd"])


@pytest.mark.parametrize("trainer", PREFERENCES)
def test_random_pairs_have_the_lengths_that_were_asked_for(trainer):
    pairs = random_pairs(LENGTHS, trainer, vocab_size=512, first=4, seed=0)
    assert set(pairs.column_names) == set(PREFERENCES[trainer].columns)
    assert sorted(row_lengths(pairs, trainer)) == sorted(LENGTHS)
    counted = facts(pairs, trainer)
    assert (counted.documents, counted.tokens, counted.longest) == (len(LENGTHS), sum(LENGTHS), 30)


@pytest.mark.parametrize("trainer", PREFERENCES)
def test_pairs_are_tokenized_and_cut_once(trainer, tmp_path):
    args = arguments(PackedSFTConfig, tmp_path, max_length=12)
    answers = [(tiny.words(n, seed=9), tiny.words(other, seed=9)) for n, other in ((3, 6), (6, 9), (9, 14), (14, 3))]
    rows = [{"prompt": tiny.words(3, seed=1), "chosen": one, "rejected": other} for one, other in answers]
    parts = {"train": Dataset.from_list(rows), "eval": Dataset.from_list(rows[:2])}
    made = tokenized(parts, trainer, tiny.tokenizer(), args)
    assert set(made["train"].column_names) == set(PREFERENCES[trainer].columns)
    assert len(made["eval"]) and np.max(row_lengths(made["train"], trainer)) <= 12
    with pytest.raises(InvalidDataset, match=r"has columns \['text'\](.|\n)*wanted: 'chosen' and 'rejected'|'label'"):
        tokenized({"train": Dataset.from_list([{"text": "a"}])}, trainer, tiny.tokenizer(), args)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", one_of_each(PREFERENCES, dict.fromkeys(PREFERENCES)))
def test_all_sides_train_the_same(trainer, preset, tmp_path):
    lengths, output = tmp_path / "lengths.json", tmp_path / "bench.json"
    lengths.write_text(json.dumps(LENGTHS))
    argv = f"bench --trainer {trainer} --model {preset} --lengths {lengths} --max_steps 2 --untimed_steps 1"
    argv += " --eval_documents 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --lora_dropout 0"
    argv += f" --gradient_checkpointing false --learning_rate 1e-3 --output {output} --output_dir {tmp_path / 'out'}"
    assert main(argv.split()) == 0
    padding, free, step = json.loads(output.read_text())["sides"]
    for side in (free, step):
        assert (padding["trainer"], side["trainer"]) == ("TRL", "trl-packfa")
        assert padding["equal"] == side["equal"] and padding["tokens_per_step"] == side["tokens_per_step"]
        assert side["fill"] == 1.0 > padding["fill"] and side["mfu"] is None
        assert_trajectory(*([each["final_loss"], each["validation_loss"]] for each in (side, padding)))
    assert step["micro_batches_per_step"] <= free["micro_batches_per_step"] == 2
