"""Ranks as threads of one process: they exchange tensors as processes do, without a process group."""

import threading
from concurrent.futures import ThreadPoolExecutor

from torch import distributed

from trl_packfa.layout.shard import RowShard


class Ranks:
    """A group of ranks. Each collective waits for all of them."""

    def __init__(self, size):
        self.size, self._barrier, self._sent = size, threading.Barrier(size, timeout=60), [None] * size
        self._own = threading.local()

    def _all_sent(self, tensor):
        self._barrier.wait()
        self._sent[self._own.rank] = tensor
        self._barrier.wait()
        return list(self._sent)

    def all_to_all_single(self, received, sent):
        found = [tensor.chunk(self.size)[self._own.rank] for tensor in self._all_sent(sent)]
        for part, other in zip(received.chunk(self.size), found, strict=True):
            part.copy_(other)

    def all_gather(self, parts, part):
        for own, other in zip(parts, self._all_sent(part), strict=True):
            own.copy_(other)

    def run(self, monkeypatch, work):
        monkeypatch.setattr(distributed, "all_to_all_single", lambda to, of, group: group.all_to_all_single(to, of))
        monkeypatch.setattr(distributed, "all_gather", lambda to, of, group: group.all_gather(to, of))

        def one(rank):
            self._own.rank = rank
            try:
                return work(RowShard(rank, self.size, self))
            except BaseException:
                self._barrier.abort()  # the others must not wait
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))
