"""The table of requirements: how a row becomes an error, what a run knows. Rows are tested where they refuse."""

import copy
from types import SimpleNamespace

import pytest
import tiny
import vision
from datasets import Dataset, IterableDataset
from training import arguments, packed_trainer, trained
from trl import SFTConfig

from trl_packfa.config.arguments import ARGUMENTS, WITHOUT_PADS
from trl_packfa.config.requirements import Found, Requirement, Run, require, where
from trl_packfa.errors import InvalidConfig, InvalidDataset, UnsupportedModel
from trl_packfa.trainers.requirements.built import BUILT, PATCHED
from trl_packfa.trainers.requirements.data import DATA
from trl_packfa.trainers.requirements.runs import LAUNCH, MACHINE, SETUP
from trl_packfa.trainers.requirements.training import Training
from trl_packfa.trainers.sft.construction import settle_arguments

RUN = Run(SimpleNamespace(size=3), "a trainer")
EVERY = (*ARGUMENTS, *WITHOUT_PADS, *SETUP, *LAUNCH, *BUILT, *PATCHED)


def test_row_that_finds_something_raises_what_why_and_do_with_the_values():
    row = Requirement(lambda r: r.size > 2 and "size", "{r.name} has {found}={r.size}.", why="{found} is {{big}}",
                      do="Lower {found}.", error=InvalidDataset)  # fmt: skip
    with pytest.raises(InvalidDataset) as raised:
        require((Requirement(lambda r: r.size > 3, "never"), row), RUN)
    assert str(raised.value) == "a trainer has size=3.\n  - size is {big}\nLower size."
    assert raised.value.why == ("size is {big}",)
    reasons = Requirement(lambda r: Found(r.size, ["a {reason}", "another"]), "{found} is too much.", why="-")
    with pytest.raises(InvalidConfig) as raised:
        require([reasons], RUN)
    assert str(raised.value) == "3 is too much.\n  - a {reason}\n  - another", "not the reason of its row"
    error = UnsupportedModel("its own words")
    with pytest.raises(UnsupportedModel) as raised:
        require([Requirement(lambda r: error, "never said")], RUN)
    assert raised.value is error, "of another table"


def test_rows_where_a_condition_holds_are_about_those_runs_alone():
    rows = where(lambda r: r.size > 2, Requirement(lambda r: r.size, "{found} is too much."))
    with pytest.raises(InvalidConfig, match="3 is too much"):
        require(rows, RUN)
    require(rows, Run(SimpleNamespace(size=2), "a trainer"))


def test_run_has_its_arguments_and_none_for_fields_that_the_config_has_not():
    assert (RUN.size, RUN.missing) == (3, None) and copy.deepcopy(RUN).size == 3

    class Broken(Training):
        @property
        def images(self):
            raise AttributeError("a fault of the code")

    with pytest.raises(AttributeError):
        Broken(RUN.args, "a trainer").images  # noqa: B018


def test_every_row_says_what_to_do_unless_the_error_is_of_another_table():
    """Those of adapters, quantization, model types and shared rows have remedies of their own."""
    assert [row.what for row in EVERY if not row.do] == [
        "an adapter that cannot be packed.",
        "a model type that cannot be packed.",
        "a model with an adapter or a quantization that cannot be packed.",
        "sequence_parallel=... with mixers or ALiBi, or with attention heads that it does not divide.",
    ]


def test_first_examples_are_read_once_and_in_plain_values():
    reads = []

    class Counted(Dataset):
        def __iter__(self):
            reads.append(1)
            return super().__iter__()

    data = Counted(Dataset.from_list([{"input_ids": [5, 6], "text": "5 6"}]).data)
    run = Training(arguments(), "a trainer", given={"train_dataset": data})
    require(DATA, run)
    assert len(reads) == 1
    formatted = Training(arguments(), "a trainer", given={"train_dataset": data.with_format("torch")})
    assert formatted.examples == [("train", {"input_ids": [5, 6], "text": "5 6"})]


def test_config_is_as_it_was_after_training_and_late_arguments_are_held_against_the_table(tmp_path):
    args = arguments(out=tmp_path, max_steps=1, check_packing=False)
    before = dict(vars(args))
    trainer = trained(packed_trainer(args))
    assert vars(args) == before
    trainer.args.max_tokens_per_microbatch = 1
    with pytest.raises(InvalidConfig, match="max_tokens_per_microbatch=1: it must be 2 or more"):
        trainer.train()


def test_a_stream_is_begun_once_before_weights_are_read(tmp_path):
    begun = []

    def texts():
        begun.append(1)
        yield from ({"text": f"number {i}"} for i in range(20))

    stream = IterableDataset.from_generator(texts)
    plain = SFTConfig(str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none")
    given = {"train_dataset": stream, "processing_class": tiny.tokenizer()}
    settled, refusal, _ = settle_arguments(tiny.model(layers=1), plain, given)
    assert settled.packing and refusal is None and begun == [1]


def test_sft_on_images_is_held_against_rows_of_every_packed_run_and_not_against_those_of_text():
    on_the_fly = vision.prompts().with_transform(lambda batch: batch)
    given = {"train_dataset": on_the_fly, "compute_metrics": print}
    run = Training(arguments(eval_packing=True), "a trainer", given=given)
    assert run.is_on_images and not run.packs_rows
    require((*DATA, *MACHINE), run)
    texts = Training(run.args, "a trainer", given={**given, "train_dataset": Dataset.from_list([{"text": "5 6"}])})
    with pytest.raises(InvalidConfig, match="compute_metrics with eval_packing=True"):
        require((*DATA, *MACHINE), texts)
    dispatched = arguments(accelerator_config={"dispatch_batches": True})
    with pytest.raises(InvalidConfig, match="dispatch_batches=True cannot carry"):
        require(MACHINE, run.with_args(dispatched))


def test_command_that_has_loaded_no_data_refuses_nothing_that_holds_for_text_alone():
    args = arguments(sequence_parallel=2)
    with pytest.raises(InvalidConfig, match="does not divide the number of processes"):
        require(MACHINE, Training(args, "a trainer"))
    require(MACHINE, Training(args, "a command", knows_data=False))
