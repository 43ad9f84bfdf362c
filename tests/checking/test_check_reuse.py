"""A resumed run takes the check of its checkpoint if nothing is another that the check depends on."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny
import torch
from calls import watched
from peft import LoraConfig
from selection import in_full
from tiny_models import small_model
from training import arguments, losses, packed_trainer, trained

from trl_packfa import candidates, check, patch
from trl_packfa.checking import check_identity, check_of_machine, keep_check, reusable_check, reuse
from trl_packfa.checking.reuse import code_digest
from trl_packfa.trainers.sft import check_gate as gate


@pytest.fixture
def checks(monkeypatch):
    return watched(monkeypatch, gate, "check")


def run(folder, *, resume=None, **options):
    args = arguments(out=folder, save_strategy="steps", save_steps=2, max_steps=4, **options)
    return trained(packed_trainer(args), resume_from_checkpoint=resume)


def test_a_resumed_run_is_not_checked_again(tmp_path, checks):
    whole = run(tmp_path)
    resumed = run(tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert len(checks) == 1 and resumed.check_report.verdict == "exact"
    assert resumed.check_report.identity == whole.check_report.identity
    assert "first batch" in resumed.check_report  # its own first batch is
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize("change", [
    {"bf16": True},
    {"attention_backend": "reference"},
    *in_full({"gradient_checkpointing": True}, {"fused_kernels": False}),
])  # fmt: skip
def test_what_has_changed_is_checked(tmp_path, checks, change):
    """The control: one thing at a time."""
    run(tmp_path)
    trainer = packed_trainer(arguments(out=tmp_path, **change))
    trainer.check(str(tmp_path / "checkpoint-2"))
    assert len(checks) == 2


@pytest.mark.slow
def test_another_process_has_the_same_identity():
    """PEFT keeps target modules in a set, which has another order in every process."""
    lines = "import tiny; from peft import get_peft_model; from training import lora_config"
    lines += "; from trl_packfa import patch; from trl_packfa.checking import check_identity"
    lines += "; print(check_identity(patch(get_peft_model(tiny.model(layers=1), lora_config()))))"
    command, found = [sys.executable, "-c", lines], set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.check_output(command, env=environment, text=True).splitlines()[-1])
    assert len(found) == 1


def test_what_an_identity_is_made_of(monkeypatch):
    def identity(**options):
        return check_identity(patch(tiny.model(layers=1), **options))

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    same = identity()
    assert identity() == same  # not of weights, nor of objects
    found = [identity(backend="reference"), check_identity(tiny.model(layers=1))]
    found += [check_identity(patch(tiny.model(layers=1).bfloat16())), check_identity(patch(tiny.model(layers=2)))]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(identity())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    found.append(identity())
    hooked = patch(tiny.model(layers=1))
    hooked.model.layers[0].register_forward_hook(lambda module, args, output: None)
    found.append(check_identity(hooked))
    # Level document computes with the attention implementation, which `to_dict` of a config does not tell.
    by_document = patch(small_model("roformer"))
    for implementation in ("eager", "sdpa"):
        by_document.config._attn_implementation = implementation
        found.append(check_identity(by_document))
    assert len({same, *found}) == len(found) + 1


def test_code_of_the_package_and_of_the_patches_counts(tmp_path, monkeypatch):
    """In a clone `patches` lies beside the package: a check of another patch must not be taken again."""
    read = []
    monkeypatch.setattr(reuse, "code_digest", lambda *roots: read.extend(roots))
    reuse._own_code.__wrapped__()
    assert [(root / name).is_file() for root, name in zip(read, ("api.py", "llama.py"), strict=True)] == [True, True]
    package, patches = tmp_path / "package", tmp_path / "patches"
    package.mkdir()
    patches.mkdir()
    (package / "api.py").write_text("a = 1")
    (patches / "llama.py").write_text("b = 1")
    before = code_digest(package, patches)
    assert code_digest(package, patches) == before
    (patches / "llama.py").write_text("b = 2")
    assert code_digest(package, patches) != before


def test_a_report_that_is_not_exact_or_not_whole_is_none(tmp_path):
    trainer = run(tmp_path)
    path, identity = tmp_path / "checkpoint-2" / "check_report.json", trainer.check_report.identity
    written = json.loads(path.read_text())
    assert reusable_check(path.parent, identity) is not None
    leak = [{**row, "difference": 1.0} if row["kind"] == "isolation" else row for row in written["rows"]]
    for text in ("", "[]", "{}", json.dumps({**written, "rows": leak}), json.dumps({**written, "identity": ""})):
        path.write_text(text)
        assert reusable_check(path.parent, identity) is None
    assert reusable_check(tmp_path / "nowhere", identity) is None


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TRL_PACKFA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checks"


def checked_run(tmp_path, **options):
    options = {"model": tiny.model(layers=2), **options}
    trainer = packed_trainer(arguments(out=tmp_path, recheck=options.pop("recheck", False)), **options)
    trainer.train()
    return trainer


def test_a_second_run_on_this_machine_is_not_checked_again(tmp_path, checks, kept):
    first, second = checked_run(tmp_path), checked_run(tmp_path)
    assert len(checks) == 1 and len(list(kept.iterdir())) == 1
    assert second.check_report.taken_from.startswith("on this machine on 20") and not first.check_report.taken_from
    assert second.check_report.is_exact and "first batch" in second.check_report  # its own first batch is checked
    assert losses(first) == losses(second)


def test_other_weights_another_adapter_and_recheck_are_checked(tmp_path, checks, kept):
    checked_run(tmp_path)
    other = tiny.model(layers=2)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    checked_run(tmp_path, model=other)
    checked_run(tmp_path, peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    checked_run(tmp_path, recheck=True)
    assert len(checks) == 4 and len(list(kept.iterdir())) == 3


def test_nothing_is_kept_of_what_is_not_exact_nor_in_an_empty_folder(kept, monkeypatch):
    model = patch(tiny.model(layers=1))
    report = replace(check(model), identity="a")
    keep_check(model, report.with_rows([report["isolation"]._replace(difference=1.0)]))
    assert not kept.exists()
    keep_check(model, report)
    assert check_of_machine(model, "a").is_exact and check_of_machine(model, "b") is None
    monkeypatch.setenv("TRL_PACKFA_CACHE", "")
    keep_check(model, report)
    assert check_of_machine(model, "a") is None


def test_a_cache_that_cannot_be_written_ends_no_run(tmp_path, checks, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRL_PACKFA_CACHE", str(tmp_path / "file"))
    assert checked_run(tmp_path).check_report.is_exact and checked_run(tmp_path).check_report.is_exact
    assert len(checks) == 2


@pytest.fixture
def takers(monkeypatch):
    """How often a model is checked, by `patch` and by the trainer, where the code was never measured."""
    count, check = [], candidates.check
    monkeypatch.setattr(candidates, "fingerprint", lambda model: "another transformers")
    for by, module in (("patch", candidates), ("trainer", gate)):
        monkeypatch.setattr(module, "check", lambda *args, by=by, **given: count.append(by) or check(*args, **given))
    return count


@pytest.mark.parametrize("options", [{}, *in_full({"bf16": True}, {"gradient_checkpointing": True})])
def test_a_trainer_takes_the_check_that_patch_had_to_make(options, tmp_path, takers, caplog):
    trainer = packed_trainer(arguments(out=tmp_path, **options))
    assert "has not been measured under packing: checking this model" in caplog.text
    trainer.train()
    assert takers == ["patch"] and trainer.check_report.is_exact and "first batch" in trainer.check_report


def test_what_patch_proved_of_another_model_does_not_count(tmp_path, takers):
    """The controls: another dtype of what computes, and an adapter that came later."""
    model = patch(tiny.model(layers=2))
    trained(packed_trainer(arguments(out=tmp_path), model=model))
    assert takers[0] == "patch" and takers[-1] in ("patch", "trainer") and len(takers) == 2
