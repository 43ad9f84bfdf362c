"""Embedding models without padding on two processes: the losses of the padded run on two."""

import pytest
import tiny
from launches import launch_whole
from tiny_models.encoders import EMBEDDINGS, small_encoder
from tolerance import assert_trajectory


def test_two_processes_train_as_padded(tmp_path):
    pytest.importorskip("sentence_transformers")
    small_encoder("bert", EMBEDDINGS).save_pretrained(tmp_path / "model")
    tiny.save_tokenizer(tmp_path / "model")
    runs = {name: {"model": str(tmp_path / "model"), "free": name == "free"} for name in ("padded", "free")}
    padded, free = launch_whole("distributed_encoders.py", tmp_path, runs).values()
    assert len(padded) == len(free) == 4
    assert_trajectory(free, padded)
