"""The half-precision tests on CPUs that this one can pretend to be: held to fewer instructions than it has. What a CPU
multiplies itself and what it emulates decides which of our kernels run, and in which dtype. The suite around this file
runs on all that the machine has."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from selection import exhaustive

ROOT = Path(__file__).parents[2]
TESTS = {
    "test_half_attention.py": "", "test_half_kernels.py": "default_run", "test_half_lora.py": "",
    "test_half_runs.py": "every_pair and lora", "test_check.py": "bf16 and (llama or qwen or granite)",
}  # fmt: skip
SAYS = """
import torch
half = torch.ones(64, 64, dtype=torch.bfloat16)
half @ half
has = [bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")()) for kind in ("bf16", "fp16")]
print("held to", torch.backends.cpu.get_cpu_capability(), *has)
"""


class Held(NamedTuple):
    """What a CPU is held to, whether this one has more, and what torch and oneDNN say when it is."""

    onednn: str
    aten: str
    reached: str
    above: str
    says: tuple[str, ...]


HELD = {
    "AVX2": Held("AVX2", "avx2", "avx2", "avx512", ("held to AVX2 False False",)),
    "AVX512": Held("AVX512_CORE", "avx512", "avx512", "avx512_bf16", ("held to AVX512", "AVX-512 with AVX512BW")),
    "AVX512-BF16": Held(
        "AVX512_CORE_BF16", "avx512", "avx512_bf16", "amx_tile", ("held to AVX512", "DL Boost and bfloat16 support")
    ),
    "AMX": Held("AVX512_CORE_AMX", "avx512", "amx_tile", "amx_fp16", ("held to AVX512", "AMX with bfloat16")),
}  # fmt: skip


def has(instructions):
    return getattr(torch.cpu, f"_is_{instructions}_supported", lambda: False)()


@pytest.mark.parametrize("name", ["AVX2", *exhaustive(*(name for name in HELD if name != "AVX2"))])
def test_half_precision_on_less_of_a_cpu(name, tmp_path):
    held = HELD[name]
    if not has(held.reached):
        pytest.skip(f"this CPU has no {name}: it cannot be held to it")
    if not has(held.above):
        pytest.skip(f"this CPU has {name} and no more: the suite around this test runs on it")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env = {**kept, "ONEDNN_MAX_CPU_ISA": held.onednn, "ATEN_CPU_CAPABILITY": held.aten, "OMP_NUM_THREADS": "1"}
    # Inductor's cache does not know of the cap: a process without it would run these graphs with longer vectors, out
    # of bounds.
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    said = run(["-c", SAYS], {**env, "ONEDNN_VERBOSE": "1"})
    assert all(words in said for words in held.says), said
    paths = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if path.name in TESTS]
    assert len(paths) == len(TESTS)
    chosen = " or ".join(f"({file} and {word})" if word else file for file, word in TESTS.items())
    told = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, *paths], env)
    assert " passed" in told and " failed" not in told


def run(arguments, env):
    """What a process of this Python prints, which must end well."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, **pipes)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
