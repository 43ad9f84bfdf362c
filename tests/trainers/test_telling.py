"""Messages of a run: its rate, what packing saves, the verdict and the speed; on the model's card; of a batch."""

import json
import re

import pytest
import rich
import tiny
import torch
from datasets import Dataset
from training import arguments, dataset, lora_config, packed_trainer, trained
from transformers import DataCollatorWithFlattening
from trl import DPOConfig, DPOTrainer, SFTConfig
from trl_trainers import pairs

import trl_packfa
from trl_packfa import PackedSFTConfig, describe, padding_free
from trl_packfa.errors import InvalidConfig
from trl_packfa.terminal.progress import RichProgressCallback
from trl_packfa.trainers.saving.card import add_section, packing_section

# TRL's default for all parameters, and ours for LoRA.
RATES = {"SFT": (2e-5, 2e-4), "DPO": (1e-6, 1e-5), "KTO": (1e-6, 1e-5), "Reward": (1e-4, 1e-4)}


def said(capsys):
    return [line.split("trl-packfa: ", 1)[1] for line in re.split(r"[\r\n]", capsys.readouterr().err)
            if "trl-packfa: " in line]  # fmt: skip


def quiet_arguments(tmp_path, cls=PackedSFTConfig, **options):
    return arguments(cls, tmp_path / "out", disable_tqdm=False, **options)


@pytest.mark.parametrize("kind", RATES)
def test_an_adapter_has_its_own_default_rate(kind):
    def make(**options):
        return getattr(trl_packfa, f"Packed{kind}Config")("out", use_cpu=True, bf16=False, **options).learning_rate

    full, lora = RATES[kind]
    assert (make(), make(use_peft=False), make(learning_rate=3e-5)) == (lora, full, 3e-5)
    assert make(learning_rate=full) == full


def without_rate(tmp_path, cls=PackedSFTConfig, **options):
    return cls(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, **options)


def test_a_rate_that_nobody_named_is_told(tmp_path, capsys):
    def told():
        return [line for line in said(capsys) if "rate" in line]

    assert packed_trainer(without_rate(tmp_path)).args.learning_rate == 2e-4
    assert told() == ["learning_rate=0.0002 for the adapter; TRL's default, 2e-05, is for all parameters"]
    packed_trainer(without_rate(tmp_path, learning_rate=2e-4))
    assert not told()
    plain = packed_trainer(without_rate(tmp_path, SFTConfig), peft_config=None)
    assert plain.args.learning_rate == 2e-5
    assert told() == ["learning_rate=2e-05 is TRL's default for all parameters; an adapter usually needs 0.0002"]


def test_a_run_that_turns_out_to_have_no_adapter_trains_with_trls_rate(tmp_path):
    late = without_rate(tmp_path)
    late.use_peft = False
    assert packed_trainer(late, peft_config=None).args.learning_rate == 2e-5
    named = without_rate(tmp_path, learning_rate=2e-4)
    named.use_peft = False
    assert packed_trainer(named, peft_config=None).args.learning_rate == 2e-4
    # The user's optimizer holds the model's parameters, so that no adapter is added.
    model = tiny.model(layers=2)
    optimizers = (torch.optim.SGD(model.parameters()), None)
    own = packed_trainer(without_rate(tmp_path), model=model, peft_config=None, optimizers=optimizers)
    assert own.args.learning_rate == 2e-5


def test_a_run_tells_the_verdict_the_data_and_the_speed(tmp_path, capsys):
    trained(packed_trainer(quiet_arguments(tmp_path)))
    verdict, data, speed = (line for line in said(capsys) if not line.startswith("checking"))
    assert verdict.startswith("check: exact, in ") and "in a row without boundaries by" in verdict
    assert re.fullmatch(r"48 documents of [\d,]+ tokens; 12 steps an epoch; \d\d% of a padded run's places are "
                        r"padding; here none is", data)  # fmt: skip
    assert re.fullmatch(r"[\d,]+ tokens trained in \d+ s, [\d,]+ tokens/s; a padded run computes [\d,]+ places, "
                        r"1\.\d\d times as many", speed)  # fmt: skip


def test_lost_tokens_and_filled_rows_are_part_of_the_line(tmp_path, capsys):
    args = quiet_arguments(tmp_path, packing_strategy="bfd", max_length=32, check_packing=False)
    trained(packed_trainer(args))
    data = next(line for line in said(capsys) if " documents of " in line)
    assert re.search(r"tokens, \d+\.\d% of all tokens cut or dropped; \d+ steps an epoch; rows are \d+% full", data)


def test_nothing_is_said_without_bars_nor_twice_by_a_command(tmp_path, capsys):
    trained(packed_trainer(arguments(out=tmp_path)))
    assert said(capsys) == []
    trainer = packed_trainer(quiet_arguments(tmp_path, check_packing=False))
    RichProgressCallback.attach(trainer, "training", rich.console.Console(quiet=True))
    trained(trainer)
    assert [line.split(" ", 2)[1] for line in said(capsys)] == ["tokens"]


def test_a_notebook_gets_tables(tmp_path, capsys, monkeypatch):
    console = rich.console.Console(width=100)
    shown = []
    monkeypatch.setattr(console, "is_jupyter", True)
    monkeypatch.setattr(console, "print", shown.append)
    monkeypatch.setattr("rich.get_console", lambda: console)
    trained(packed_trainer(quiet_arguments(tmp_path, check_packing=False)))
    assert [table.title for table in shown] == ["what packing does to the data", "what packing makes of it"]
    assert not [line for line in said(capsys) if " documents of " in line]


def test_a_trainer_without_padding_tells_its_speed(tmp_path, capsys):
    args = quiet_arguments(tmp_path, DPOConfig, max_length=None)
    options = {"processing_class": tiny.tokenizer(), "peft_config": lora_config()}
    trainer = DPOTrainer(tiny.model(), args=args, train_dataset=Dataset.from_list(pairs()), **options)
    trained(padding_free(trainer))
    speed = said(capsys)[-1]
    assert re.match(r"[\d,]+ tokens trained in \d+ s, [\d,]+ tokens/s; a padded run computes [\d,]+ places, ", speed)
    assert "without padding checked on model before the first step" in speed


def test_reports_are_saved_beside_the_model(tmp_path):
    trainer = trained(packed_trainer(arguments(out=tmp_path / "out")))
    trainer.save_model()
    trainer.save_model(str(tmp_path / "other"))
    for folder in ("out", "other"):
        assert json.loads((tmp_path / folder / "check_report.json").read_text())["verdict"] == "exact"
        assert json.loads((tmp_path / folder / "packing_report.json").read_text())["train"]["documents"] == 48
    padded = packed_trainer(arguments(out=tmp_path / "padded", packing=False), train_dataset=dataset())
    padded.save_model()
    assert not list((tmp_path / "padded").glob("*_report.json"))


def test_the_card_of_a_checkpoint_says_how_it_was_packed_and_what_proves_it(tmp_path):
    trainer = trained(packed_trainer(arguments(out=tmp_path, save_strategy="steps", save_steps=3, max_length=48)))
    card = (tmp_path / "README.md").read_text()
    section = card.split("## Packing\n")[1].split("\n## ")[0]
    report = trainer.check_report
    for part in ('packing_strategy="step"', "max_length=48", "verdict `exact`", f"level `{report.level}`",
                 f"attention backend `{report.backend}`", str(report["isolation"]), "documents 48",
                 f"transformers {report.versions['transformers']}"):  # fmt: skip
        assert part in section, part
    assert card.index("## Training procedure") < card.index("## Packing") < card.index("## Citations")
    trainer.create_model_card()
    assert (tmp_path / "README.md").read_text().count("## Packing") == 1
    assert "- trl-packfa\n" in card.split("---")[1], "the tag"


def test_the_verdict_on_the_card_is_the_reports(tmp_path):
    """The negative control: a report of a leak does not read as exact, nor does a run without check."""
    trainer = packed_trainer(arguments(out=tmp_path))
    report = trainer.check()
    leak = report.with_rows([report["isolation"]._replace(difference=1.0)])
    assert "verdict `leak`" in packing_section(trainer.args.card_settings, {}, leak)
    assert "Check: not checked before training" in packing_section(trainer.args.card_settings, {}, None)


def test_packing_false_is_trls_trainer_with_trls_card(tmp_path):
    trainer = trained(packed_trainer(arguments(out=tmp_path, packing=False)))
    assert describe(trainer.model) == "not patched"
    assert "documents" not in trainer.state.log_history[0]
    trainer.create_model_card()
    assert "## Packing" not in (tmp_path / "README.md").read_text()


def test_a_section_is_appended_where_a_card_has_no_citations():
    card = "# Model\n"
    for section in ("## Packing\n\nfirst\n", "## Packing\n\nsecond\n"):
        card = add_section(card, section)
    assert card == "# Model\n\n## Packing\n\nsecond\n"


def test_a_local_model_has_its_name_and_a_checkpoint_the_runs_card(tmp_path):
    """TRL calls a folder None, PEFT writes an empty template beside each checkpoint's adapter."""
    model = tiny.model(layers=1)
    model.config._name_or_path = str(tmp_path / "my-base")
    (tmp_path / "my-base").mkdir()
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "check_packing": False}
    packed_trainer(arguments(out=tmp_path, **options), model=model).train()
    card = (tmp_path / "README.md").read_text()
    assert "fine-tuned version of `my-base`, a local folder" in card and "None" not in card
    assert "not checked before training" in card
    assert str(tmp_path) not in card.split("## Packing")[0]
    assert (tmp_path / "checkpoint-2" / "README.md").read_text() == card


ROWS = [
    {"prompt": "1 2 3 ", "completion": "4 5"},
    {"prompt": "user 6 ", "completion": "7"},
    {"prompt": "8 ", "completion": "9 10 11"},
]
SEEN = [
    "10 tokens, 2 documents; [[trained]]",
    "document 0, 6 tokens, 3 trained:  1 2 3 [[4 5 </s>]]",
    "document 1, 4 tokens, 2 trained:  user 6 [[7 </s>]]",
]


def trainer(out, *, stream=False, collator=None, **options):
    data = Dataset.from_list(ROWS)
    args = arguments(out=out, per_device_train_batch_size=2, max_length=64, **options)
    data = data.to_iterable_dataset() if stream else data
    return packed_trainer(args, train_dataset=data, data_collator=collator)


CASES = {
    "step": {}, "bfd": {"packing_strategy": "bfd"}, "stream": {"stream": True}, "padding": {"pad_to_multiple_of": 8},
    "another collator": {"collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_shown_with_boundaries_and_labels(case, tmp_path):
    """And no random number is drawn: a run after it is the run without."""
    run = trainer(tmp_path, **CASES[case])
    before = torch.get_rng_state()
    first, *documents = run.preview_batch().splitlines()
    padded = "16 tokens, 3 documents, the last of them 6 tokens of padding; [[trained]]"
    assert first == (padded if case == "padding" else SEEN[0]) and documents[:2] == SEEN[1:]
    assert torch.equal(torch.get_rng_state(), before)


def test_without_packing_there_is_none(tmp_path):
    with pytest.raises(InvalidConfig, match="packing=False: there is no packed batch"):
        trainer(tmp_path, packing=False).preview_batch()
