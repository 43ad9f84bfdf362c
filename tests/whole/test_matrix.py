"""The matrix of architectures: made by running them, resumable, and what is committed is what running gives. `make
test-all` measures one type of each kind again, `make test-exhaustive` all. `test_architectures.py` runs every type
that a patch serves against its documents alone."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import support_matrix as matrix
from committed import assert_is_what_is_committed, kind_of, measured
from selection import one_of_each
from tiny_models import all_types
from tolerance import VISIBLE

from trl_packfa.cli.main import main
from trl_packfa.errors import PackingError
from trl_packfa.patches.measured import results


def test_every_version_keeps_its_fingerprints_and_the_newest_the_say():
    exact = {"verdict": "exact", "config_type": "a", "source": "one", "level": "attention"}
    whole = matrix.merged({}, {"transformers": "5.9.0"}, {"a": exact}, interface="masks")
    whole = matrix.merged(whole, {"transformers": "5.10.0"}, {"a": {**exact, "source": "two", "level": "attention"}})
    whole = matrix.merged(whole, {"transformers": "5.8.0"}, {"a": {**exact, "source": "old", "level": "document"}})
    assert whole["transformers"] == ["5.8.0", "5.9.0", "5.10.0"] and whole["versions"] == {"transformers": "5.10.0"}
    assert whole["interfaces"] == {"5.8.0": "", "5.9.0": "masks", "5.10.0": ""}
    assert whole["types"]["a"]["level"] == "attention"
    assert whole["types"]["a"]["sources"] == {"5.8.0": "old", "5.9.0": "one", "5.10.0": "two"}
    leaks = matrix.merged(whole, {"transformers": "5.9.0"}, {"a": {**exact, "verdict": "leak"}})
    assert leaks["types"]["a"]["sources"] == {"5.8.0": "old", "5.10.0": "two"}, "no longer trusted there"
    other = matrix.merged(whole, {"transformers": "5.10.0"}, {"a": {**exact, "source": "two", "level": "interface"}})
    assert other["types"]["a"]["sources"] == {"5.10.0": "two"}, "other versions were measured with another patch"


def test_a_run_is_resumed_where_it_stopped(tmp_path, monkeypatch):
    path, seen = tmp_path / "models.json", []
    partial = path.with_suffix(".partial")
    monkeypatch.setattr(matrix, "all_types", lambda: ("llama", "mamba", "cpmant"))
    monkeypatch.setattr(matrix, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    with pytest.raises(KeyboardInterrupt):
        matrix.run(path, jobs=1, seen=lambda name, result: (seen.append(name), stop(len(seen) == 2)))
    assert len(json.loads(partial.read_text())["types"]) == 1 and not path.exists()
    found = matrix.run(path, jobs=1, seen=lambda name, result: seen.append(name))
    assert len(seen) == 4 and not partial.exists() and found == json.loads(path.read_text())
    assert_is_what_is_committed(found)
    again = matrix.run(path, jobs=1, seen=lambda name, result: seen.append(name), only=("llama",))
    assert seen[4:] == ["llama"] and again["types"].keys() == found["types"].keys()
    path.write_text(json.dumps({**found, "transformers": ["5.1.0"]}))
    with pytest.raises(PackingError, match="one type alone would not fit the others"):
        matrix.run(path, jobs=1, seen=lambda name, result: None, only=("llama",))


def stop(now):
    if now:
        raise KeyboardInterrupt


def test_the_table_for_people_and_for_programs(capsys):
    assert main(["models", "--json"]) == 0
    rows = {row["model_type"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 196
    assert (rows["jamba"]["unpatched"], rows["jamba"]["CPU"]) == ("leaks", "module")
    assert rows["jamba"]["CUDA with kernels"] == "native where exact, else module"
    assert rows["cpmant"]["verdict"] == "refused" and "not causal under padding" in rows["cpmant"]["why"]
    assert main(["models"]) == 0
    assert "granitemoehybrid" in capsys.readouterr().out


KINDS = {name: kind_of(results()[name]) for name in all_types()}


# Ten seconds and more each.
SLOW = ("bailing_hybrid", "inkling2_loop_text", "qwen4_exp", "rwkv")


@pytest.mark.parametrize("model_type", one_of_each(all_types(), KINDS, slow=SLOW))
def test_running_gives_what_is_committed(model_type):
    found = measured(model_type)
    assert_is_what_is_committed(found)
    if results()[model_type]["verdict"] == "exact":
        assert found["types"][model_type]["control"] > VISIBLE
