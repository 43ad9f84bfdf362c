"""Checkpoints that are damaged, incomplete or of another run: named, and passed over or refused, by every trainer."""

import json
import shutil

import pytest
from datasets import Dataset
from peft import LoraConfig
from training import SAVING, arguments, logs_of, packed_trainer, trained
from trl_trainers import build_packed

from trl_packfa.errors import InvalidConfig
from trl_packfa.trainers.saving import checkpoint_files
from trl_packfa.trainers.saving.checkpoint_files import MANIFEST, PACKING_REPORT, damage, last_whole_checkpoint

# A rate that does not depend on how many steps are meant.
LONGER = {**SAVING, "max_steps": 6, "lr_scheduler_type": "constant"}
DPO = {name: value for name, value in {**LONGER, "lora": True}.items() if name != "check_packing"}


def sft(out, **options):
    return packed_trainer(arguments(out=out, **{**LONGER, **options}))


def dpo(out, **options):
    return build_packed("dpo", out, **{**DPO, **options})


TRAINERS = {"sft": sft, "dpo": dpo}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By trainer, a folder with the checkpoints 2 and 4."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in TRAINERS}
    for kind, make in TRAINERS.items():
        make(folders[kind], max_steps=4).train()
    return folders


@pytest.fixture
def run(saved, tmp_path):
    """A copy to spoil."""
    return lambda kind: shutil.copytree(saved[kind], tmp_path / kind)


def truncated(path):
    path.write_bytes(path.read_bytes()[:100])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


ADAPTER = "adapter_model.safetensors"
DAMAGES = {
    "a cut adapter": (ADAPTER, truncated, r"100 of the [\d,]+ bytes of adapter_model\.safetensors"),
    "a cut optimizer": ("optimizer.pt", truncated, r"100 of the [\d,]+ bytes of optimizer\.pt"),
    "no optimizer": ("optimizer.pt", lambda path: path.unlink(), r"no optimizer\.pt"),
    "one bit": ("optimizer.pt", flipped, r"other contents in optimizer\.pt than were written"),
    "cut random states": ("rng_state.pth", truncated, r"100 of the [\d,]+ bytes of rng_state\.pth"),
    "no schedule": ("scheduler.pt", lambda path: path.unlink(), r"no scheduler\.pt"),
    "no report": (PACKING_REPORT, lambda path: path.unlink(), rf"no {PACKING_REPORT}"),
    "a cut manifest": (MANIFEST, truncated, rf"a {MANIFEST} that cannot be read"),
}


@pytest.mark.parametrize(("name", "kind"), [*((name, "sft") for name in DAMAGES), ("one bit", "dpo")])
def test_the_newest_whole_checkpoint_is_taken_and_the_damaged_one_named(run, caplog, name, kind):
    folder, (file, spoil, message) = run(kind), DAMAGES[name]
    spoil(folder / "checkpoint-4" / file)
    assert last_whole_checkpoint(folder) == str(folder / "checkpoint-2")
    assert [r.getMessage() for r in caplog.records if "checkpoint-4 is incomplete" in r.getMessage()]
    trainer = TRAINERS[kind](folder)
    with pytest.raises(InvalidConfig, match=rf"checkpoint-4 is damaged: it has {message}(.|\n)*'last'"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_resumed_run_continues_as_if_undisturbed(saved, run, tmp_path, kind):
    folder = run(kind)
    truncated(folder / "checkpoint-4" / ADAPTER)
    straight = TRAINERS[kind](shutil.copytree(saved[kind], tmp_path / "straight"))
    resumed = TRAINERS[kind](folder)
    for trainer in (straight, resumed):
        trainer.train(resume_from_checkpoint="last")
    names = ("loss", "num_tokens", "micro_batches", "rewards/margins", "entropy")
    found, expected = ([[e.get(name) for name in names] for e in logs_of(t)] for t in (resumed, straight))
    assert found == expected and len(found) == 6
    card = (folder / "checkpoint-2" / "README.md").read_text()
    assert "## Packing" in card and ("without padding checked on model" in card or kind == "sft")


def test_nothing_whole_names_every_damage(run):
    folder = run("sft")
    for number in (2, 4):
        truncated(folder / f"checkpoint-{number}" / "optimizer.pt")
    said = r"no whole checkpoint(.|\n)*checkpoint-2 has 100 of (.|\n)*checkpoint-4 has"
    with pytest.raises(InvalidConfig, match=said):
        sft(folder).train(resume_from_checkpoint=True)


def test_a_card_may_be_edited_and_files_added(run):
    checkpoint = run("sft") / "checkpoint-4"
    (checkpoint / "README.md").write_text("mine")
    (checkpoint / "notes.txt").write_text("mine")
    assert damage(checkpoint) is None


def test_parts_in_folders_are_in_the_manifest(tmp_path):
    """As FSDP and DeepSpeed write sharded weights and optimizers."""
    part = tmp_path / "pytorch_model_fsdp_0" / "__0_0.distcp"
    part.parent.mkdir()
    part.write_bytes(b"weights")
    checkpoint_files.write_manifest(tmp_path)
    assert damage(tmp_path) is None
    part.write_bytes(b"weight")
    assert damage(tmp_path) == f"6 of the 7 bytes of {part.relative_to(tmp_path)}"


@pytest.mark.parametrize("file", ["optimizer.pt", "rng_state.pth"])
def test_a_checkpoint_of_an_earlier_version_is_taken_and_what_it_lacks_is_said(run, caplog, file):
    folder = run("sft")
    (folder / "checkpoint-4" / MANIFEST).unlink()
    (folder / "checkpoint-4" / file).unlink()
    trainer = trained(sft(folder), resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert f"checkpoint-4 has no {MANIFEST}: its files are not checked" in caplog.text
    assert "checkpoint-4 does not hold " in caplog.text and f"{file}" in caplog.text


def test_a_checkpoint_of_the_model_only_says_so(tmp_path, caplog):
    sft(tmp_path, max_steps=2, save_only_model=True).train()
    sft(tmp_path, save_only_model=True).train(resume_from_checkpoint=True)
    assert "does not hold optimizer and schedule" in caplog.text and "its files are not checked" not in caplog.text


def test_other_labels_are_refused(run):
    folder = run("sft")
    said = r"other data(.|\n)*what is trained of them then: \d+ tokens(.|\n)*now: \d+"
    with pytest.raises(InvalidConfig, match=said):
        sft(folder, completion_only_loss=False).train(resume_from_checkpoint=True)
    trainer = trained(sft(folder, completion_only_loss=False, ignore_data_skip=True), resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("kind", ["sft", "kto"])
def test_other_labels_of_the_same_tokens_are_refused(kind, tmp_path):
    """Given labels, and KTO's good and bad answers."""
    documents = [{"input_ids": list(range(5, 15 + i)), "labels": list(range(5, 15 + i))} for i in range(16)]

    def build():
        if kind == "kto":
            return build_packed("kto", tmp_path, **{**DPO, "max_steps": 2})
        return packed_trainer(arguments(out=tmp_path, **SAVING), train_dataset=Dataset.from_list(documents))

    build().train()
    documents[0]["labels"][-1] = -100
    again = build()
    if kind == "kto":
        again.train_dataset = again.train_dataset.map(lambda row: {"label": not row["label"]})
    with pytest.raises(InvalidConfig, match="what is trained of them"):
        again.train(resume_from_checkpoint=True)


ADAPTERS = {
    "rank": ({"r": 8}, r"r then: 4; now: 8"),
    "alpha": ({"lora_alpha": 64}, r"lora_alpha then: 8; now: 64"),
    "targets": ({"target_modules": ["q_proj"]}, r"modules: 12 only then: model\.layers\.0\.mlp\.down_proj, "),
    "scaling": ({"use_rslora": True}, r"use_rslora then: None; now: True"),
    "none": (None, r"peft_type then: LORA; now: None"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_another_adapter_is_refused(run, name):
    folder, (changes, message) = run("sft"), ADAPTERS[name]
    given = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    adapter = None if changes is None else LoraConfig(**{**given, **changes})
    trainer = packed_trainer(arguments(out=folder, use_peft=adapter is not None, **LONGER), peft_config=adapter)
    with pytest.raises(InvalidConfig, match=rf"with another adapter(.|\n)*{message}"):
        trainer.train(resume_from_checkpoint=True)


def test_dropout_may_change_and_the_order_of_targets(run):
    targets = ["down_proj", "up_proj", "gate_proj", "o_proj", "v_proj", "k_proj", "q_proj"]
    given = LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, init_lora_weights="gaussian")
    trainer = packed_trainer(arguments(out=run("sft"), **LONGER), peft_config=given)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


def test_the_manifest_names_what_a_resumed_run_reads(saved):
    files = json.loads((saved["sft"] / "checkpoint-4" / MANIFEST).read_text())["files"]
    wanted = {ADAPTER, "adapter_config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth",
              "trainer_state.json", "packing_progress.json", PACKING_REPORT}  # fmt: skip
    assert wanted <= set(files) and MANIFEST not in files


def test_changed_arguments_are_named_with_what_they_do(run, caplog):
    folder = run("sft")
    again = shutil.copytree(folder, folder.parent / "again")
    sft(folder).train(resume_from_checkpoint="last")
    said = ("has no effect", "rows of the dataset", "does not hold", "not checked", "incomplete")
    assert not [words for words in said if words in caplog.text], "of a whole checkpoint of the same run"
    changed = {"learning_rate": 0.5, "per_device_train_batch_size": 2}
    resumed = trained(sft(again, **changed), resume_from_checkpoint="last")
    assert "learning_rate=0.5 has no effect" in caplog.text and "go on with 0.01" in caplog.text
    assert "a step holds 2 rows of the dataset, in the checkpoint's run 4" in caplog.text
    assert {entry["learning_rate"] for entry in logs_of(resumed)} == {0.01}
