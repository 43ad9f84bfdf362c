"""The matrix of architectures: made by running them, resumable, and what is committed is what running gives."""

import json

import pytest
import support_matrix as matrix

from trl_packfa.cli.main import main
from trl_packfa.errors import PackingError
from trl_packfa.patches.measured import results

COMPARED = ("verdict", "level", "unpatched", "by_document", "source", "why")


def test_a_run_is_resumed_where_it_stopped(tmp_path, monkeypatch):
    path, seen = tmp_path / "models.json", []
    monkeypatch.setattr(matrix, "all_types", lambda: ("llama", "mamba", "cpmant"))
    monkeypatch.setattr(matrix, "ProcessPoolExecutor", OneByOne)
    with pytest.raises(KeyboardInterrupt):
        matrix.run(path, jobs=1, seen=lambda name, result: (seen.append(name), stop(len(seen) == 2)))
    assert len(json.loads(path.read_text())["types"]) == 1
    found = matrix.run(path, jobs=1, seen=lambda name, result: seen.append(name))
    assert len(seen) == 4 and found["complete"]
    for name, result in found["types"].items():
        assert [result.get(key) for key in COMPARED] == [results()[name].get(key) for key in COMPARED]
    again = matrix.run(path, jobs=1, seen=lambda name, result: seen.append(name), only=("llama",))
    assert seen[4:] == ["llama"] and again["types"].keys() == found["types"].keys()
    path.write_text(json.dumps({**found, "versions": {"torch": "1.0"}}))
    with pytest.raises(PackingError, match="one type alone would not fit the others"):
        matrix.run(path, jobs=1, seen=lambda name, result: None, only=("llama",))


def stop(now):
    if now:
        raise KeyboardInterrupt


class OneByOne:
    """A pool of this process."""

    def __init__(self, jobs, mp_context, initializer):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *args):
        from concurrent.futures import Future

        future = Future()
        future.set_result(function(*args))
        return future


def test_the_table_for_people_and_for_programs(capsys):
    assert main(["models", "--json"]) == 0
    rows = {row["model_type"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 189
    assert (rows["jamba"]["unpatched"], rows["jamba"]["CPU"]) == ("leaks", "module")
    assert rows["jamba"]["CUDA with kernels"] == "native where proven, else module"
    assert rows["cpmant"]["verdict"] == "refused" and "not causal under padding" in rows["cpmant"]["why"]
    assert main(["models"]) == 0
    assert "granitemoehybrid" in capsys.readouterr().out


@pytest.mark.slow
def test_running_gives_what_is_committed(tmp_path):
    found = matrix.run(tmp_path / "models.json", jobs=2, seen=lambda name, result: None)["types"]
    assert found.keys() == results().keys()
    for name, result in found.items():
        assert [result.get(key) for key in COMPARED] == [results()[name].get(key) for key in COMPARED], name
