"""A run resumes as itself: data, tokenizer and versions are those that it began with, or it says what changed."""

import json

import pytest
import tiny
from datasets import Dataset
from training import SAVING, arguments, dataset, packed_trainer, rows, trained

from trl_packfa.errors import InvalidConfig
from trl_packfa.trainers.saving.checkpoint_files import MANIFEST, write_manifest


def resumed(out, changes=None, **options):
    second = packed_trainer(arguments(out=out, **{**SAVING, "max_steps": 6}, **options), **(changes or {}))
    return trained(second, resume_from_checkpoint=True)


def run_then_resume(out, changes=None, **options):
    packed_trainer(arguments(out=out, **SAVING)).train()
    return resumed(out, changes, **options)


OTHER_WORDS = [{**row, "prompt": row["prompt"].replace("7", "8")} for row in rows()]


@pytest.mark.parametrize(("changes", "said"), [
    ({"train_dataset": dataset(40)},
     r"from a run on other data\.\n  - training documents then: 48 documents"),
    ({"train_dataset": Dataset.from_list(OTHER_WORDS)}, "training documents then: 48 documents"),
    ({"processing_class": tiny.tokenizer(words=["one", "more"])}, "tokenizer then: 86 tokens"),
], ids=["other documents", "other words", "another tokenizer"])  # fmt: skip
def test_what_changed_since_the_checkpoint_is_refused(changes, said, tmp_path):
    with pytest.raises(InvalidConfig, match=said):
        run_then_resume(tmp_path, changes)


def test_the_same_run_resumes_and_a_new_epoch_may_have_other_data(tmp_path):
    assert run_then_resume(tmp_path / "same").state.global_step == 6
    other = {"train_dataset": dataset(40)}
    assert run_then_resume(tmp_path / "new", other, ignore_data_skip=True).state.global_step == 6


def test_another_version_is_named(tmp_path, caplog):
    packed_trainer(arguments(out=tmp_path, **SAVING)).train()
    path = tmp_path / "checkpoint-4" / "packing_progress.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": "0.0.1"}))
    write_manifest(path.parent)
    resumed(tmp_path)
    assert "written by version 0.0.1" in caplog.text


def test_a_corrupt_progress_file_is_named(tmp_path):
    packed_trainer(arguments(out=tmp_path, **SAVING)).train()
    (tmp_path / "checkpoint-4" / "packing_progress.json").write_text('{"num_tok')
    (tmp_path / "checkpoint-4" / MANIFEST).unlink()  # of an earlier version: else it is passed over
    with pytest.raises(InvalidConfig, match=r"packing_progress\.json is corrupt"):
        packed_trainer(arguments(out=tmp_path, **SAVING)).train(resume_from_checkpoint=True)
