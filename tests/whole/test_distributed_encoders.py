"""Embedding models without padding on two processes: the losses of the padded run on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from tiny_models.encoders import EMBEDDINGS, small_encoder
from tolerance import TRAJECTORY

ROOT = Path(__file__).parents[2]


def test_two_processes_train_as_padded(tmp_path):
    pytest.importorskip("sentence_transformers")
    small_encoder("bert", EMBEDDINGS).save_pretrained(tmp_path / "model")
    tiny.save_tokenizer(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(ROOT / "tests" / "shared" / "distributed_encoders.py")]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "tests" / "shared"), str(ROOT / "tools")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(tmp_path / "model"), str(tmp_path / "out.json")], check=True, cwd=ROOT, env=environment
    )
    padded, free = json.loads((tmp_path / "out.json").read_text())
    assert len(padded) == len(free) == 4
    for one, other in zip(padded, free, strict=True):
        assert all(abs(a - b) <= TRAJECTORY * max(1.0, abs(a)) for a, b in zip(one, other, strict=True))
