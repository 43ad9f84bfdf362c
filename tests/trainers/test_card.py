"""The model card's section on packing."""

import tiny
from training import arguments, packed_trainer, trained

from trl_packfa.trainers.saving.card import add_section, packing_section


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


def test_padded_training_has_trls_card(tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path, packing=False))
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
