import gc
import json
import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The suite runs one process per core; so do the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test takes the check of another one.
os.environ["TRL_PACKFA_CACHE"] = ""

from pathlib import Path, PurePath

import pytest
import torch
from compiling import compile_anew

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # one process runs them all
    LoadScopeScheduling = object

# Scripts that tests start find what the tests share, and the small models, as the tests themselves do.
TESTS = Path(__file__).parent
SHARED = [str(TESTS / "shared"), str(TESTS.parent / "tools")]
os.environ["PYTHONPATH"] = os.pathsep.join([*SHARED, *filter(None, [os.environ.get("PYTHONPATH")])])

# Files whose tests share a launch of several processes.
LAUNCHED_ONCE = {
    "test_distributed", "test_distributed_images", "test_distributed_trainers", "test_kills", "test_sharded_rows",
    "test_zero",
}  # fmt: skip
# These tests take minutes. They begin first, or one of them would run alone at the end, beside an idle core.
LONGEST = [*sorted(LAUNCHED_ONCE), "test_gpu_stages", "test_soak", "test_compile"]

try:
    from hypothesis import settings
except ImportError:  # the tests that need it cannot run
    pass
else:
    # By default hypothesis fails a test that takes 200 ms, which a machine with other work to do reaches.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


class OneLaunchOneWorker(LoadScopeScheduling):
    """Schedule each test on any free worker, but the tests of one launch on the same worker. `xdist_group` does
    nothing on pytest 9.2."""

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        return file if PurePath(file).stem in LAUNCHED_ONCE else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return OneLaunchOneWorker(config, log)


def pytest_collection_modifyitems(items):
    """Order the longest tests first."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish():
    """Freeze the objects of the imports, so that garbage collection skips them, and collect less often. accelerate
    collects after every training run and would visit all of them each time. Collections took 7 % of the suite's
    time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def alone():
    """Run each test as the first one of its process: seeded, no compiled graph, and environment variables restored.
    accelerate sets variables. Without CUDA, PEFT's BOFT leaves `CXX=gcc`, and no later graph can be linked with it."""
    torch.set_num_threads(1)  # the suite runs one process per core; accelerate sets it anew where it finds ranks
    torch.manual_seed(0)
    compile_anew()
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        else:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True)
def remembered_checks(request, monkeypatch):
    """Take the check of each model once in tests of trainers; `own_check` marks those that need one of their own."""
    folder = request.path.relative_to(TESTS).parts[0]
    if folder in ("trainers", "whole") and request.node.get_closest_marker("own_check") is None:
        from check_memo import remember

        remember(monkeypatch.setattr)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Make a folder for a file's launches of several processes."""
    return tmp_path_factory.mktemp(request.path.stem)


@pytest.fixture(scope="session")
def lengths_file(tmp_path_factory):
    """Write a file of document lengths for `--lengths`."""
    from training import LENGTHS

    path = tmp_path_factory.mktemp("lengths") / "lengths.json"
    path.write_text(json.dumps(LENGTHS))
    return str(path)


@pytest.fixture(scope="session")
def preset(tmp_path_factory):
    """Save the benchmark's smallest model."""
    from trl_packfa.bench.presets import save_preset

    path = str(tmp_path_factory.mktemp("preset"))
    save_preset("tiny", path, dtype="float32")
    return path


@pytest.fixture
def saved(tmp_path):
    """Save a folder with a config and a tokenizer but no weights, and a dataset file."""
    import tiny
    from training import FORMATS

    folder, data = tmp_path / "model", tmp_path / "data.jsonl"
    tiny.model(layers=2).config.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    data.write_text("\n".join(json.dumps(row) for row in FORMATS["prompt-completion"]))
    return {"MODEL": str(folder), "DATA": str(data), "DIR": str(tmp_path)}
