"""`TrainingClock`: seconds and counts of training, whatever comes between two steps."""

from types import SimpleNamespace

import numpy as np
import pytest

from trl_packfa.trainers import clock
from trl_packfa.trainers.clock import TrainingClock


class Counting(TrainingClock):
    documents = 0

    def _counts(self):
        return np.append(super()._counts(), self.documents)


@pytest.fixture
def run(monkeypatch):
    """A run whose time and documents move by the test's own hand."""
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    counting = Counting()

    def spend(seconds, documents=0):
        now[0] += seconds
        counting.documents += documents

    return counting, spend


def test_what_comes_after_a_step_does_not_count(run):
    counting, spend = run
    spend(50, 5)  # before training
    counting.on_train_begin()
    for event in (counting.on_evaluate, counting.on_save, counting.on_log, counting.on_predict):
        spend(2, 3)
        counting.on_step_end()
        spend(1000, 7)
        event()
    assert counting.take().tolist() == [8, 12]


def test_a_log_counts_the_wait_for_the_device_before_it(run):
    counting, spend = run
    counting.on_train_begin()
    spend(2, 1)
    counting.on_step_end()
    spend(3)  # the host waits for the loss
    assert counting.take().tolist() == [5, 1]
    counting.on_log()
    with counting.paused():
        spend(60, 9)
    spend(1, 1)
    assert counting.take().tolist() == [1, 1] and counting.whole.tolist() == [6, 2]
    counting.on_train_begin()
    assert counting.take().tolist() == [0, 0], "of the next run"


def test_a_log_before_training_has_counted_nothing(run):
    counting, spend = run
    spend(5, 5)
    assert counting.take().tolist() == [0, 0]
