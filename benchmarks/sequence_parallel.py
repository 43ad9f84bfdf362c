"""Peak memory of a process by row length and number of processes that share the row, and time beside DDP.

    OMP_NUM_THREADS=1 python benchmarks/sequence_parallel.py

It needs Linux. Each measurement runs in processes of its own (gloo): one forward and backward of a small Llama in
float32 over a row of documents of 1,024 tokens, with activation checkpointing. Memory is the peak of resident memory
during the pass above what lay there before it. DDP and shared rows run the same two rows per step, in turn, in
one set of processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packfa import DataCollatorForPacking, patch, shard_batch
from trl_packfa.bench.measuring import reset_peak
from trl_packfa.memory import resident_peak

VOCABULARY, DOCUMENT = 1024, 1024


def build() -> LlamaForCausalLM:
    """Build the patched model with random weights, the same on every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=DOCUMENT, hidden_size=128, intermediate_size=352,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return patch(model)


def row(length: int, *, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (length // DOCUMENT, DOCUMENT), generator=generator).tolist()
    return DataCollatorForPacking(return_flash_attn_kwargs=False)([{"input_ids": document} for document in ids])


def loss_of(model: Any, batch: dict[str, Any], tokens: int) -> torch.Tensor:
    """Compute the summed loss of this process's labels over the row's number of tokens."""
    return model(**batch, num_items_in_batch=tokens, use_cache=False).loss


def group_of(world: int) -> DeviceMesh:
    """Return the mesh of all processes, with a group of its own beside DDP's."""
    return init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "row"))["row"]


def measure_memory(rank: int, world: int, length: int, out: Any) -> None:
    """Put the peak bytes of each process above its start into `out`."""
    mesh, model = group_of(world), build()
    for tokens in (2 * DOCUMENT, length):  # a short row first, so that gradients and workspaces exist
        batch = shard_batch(row(tokens), mesh) if world > 1 else row(tokens)
        before = psutil.Process().memory_info().rss
        reset_peak()
        loss_of(model, batch, tokens).backward()
    out[rank] = resident_peak() - before


def measure_time(rank: int, world: int, length: int, out: Any, repeats: int = 7) -> None:
    """Put seconds of a step of `world` rows into `out`: one row for each process (DDP), or all rows shared."""
    mesh, rows = group_of(world), [row(length, seed=seed) for seed in range(world)]
    model = DistributedDataParallel(build())

    def ddp() -> None:
        loss_of(model, rows[rank], length).backward()

    def shared() -> None:
        for number, batch in enumerate(rows):
            with nullcontext() if number + 1 == world else model.no_sync():
                loss_of(model, shard_batch(batch, mesh), length).backward()

    ways, seconds = {"DDP": ddp, "shared": shared}, {"DDP": [], "shared": []}
    for number in range(repeats + 1):
        for name, way in ways.items():
            distributed.barrier()
            started = time.perf_counter()
            way()
            distributed.barrier()
            if number:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - started)
    out[rank] = seconds


def _enter(rank: int, world: int, work: Any, length: int, store: str, out: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    work(rank, world, length, out)
    distributed.destroy_process_group()


def run(work: Any, world: int, length: int) -> list[Any]:
    """Run `work` in `world` processes, and return what each has put out."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        out = manager.dict()
        multiprocessing.spawn(_enter, (world, work, length, f"{folder}/store", out), nprocs=world)
        return [out[rank] for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--lengths", default="8192,16384,32768,65536")
    parser.add_argument("--timed", type=int, default=8192, help="row length of the timed steps")
    asked = parser.parse_args()
    if sys.platform != "linux":
        parser.error("resident memory is read from /proc")
    processes = [int(number) for number in asked.processes.split(",")]
    print("| tokens of the row |", " | ".join(f"{n} processes" if n > 1 else "1 process" for n in processes), "|")
    print("|---" * (len(processes) + 1) + "|")
    for length in (int(number) for number in asked.lengths.split(",")):
        # So that freed tensors leave resident memory, and the peak is that of living ones.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        peaks = [max(run(measure_memory, world, length)) / 2**20 for world in processes]
        print(f"| {length:,} |", " | ".join(f"{peak:,.0f} MiB" for peak in peaks), "|", flush=True)
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    seconds = run(measure_time, 2, asked.timed)[0]
    ratios = sorted(shared / ddp for shared, ddp in zip(seconds["shared"], seconds["DDP"], strict=True))
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    print(
        f"\nA step of two rows of {asked.timed:,} tokens on 2 processes: DDP {middle['DDP']:.2f} s, shared "
        f"{middle['shared']:.2f} s, {statistics.median(ratios):.2f} times ({ratios[1]:.2f} to {ratios[-2]:.2f})"
    )


if __name__ == "__main__":
    main()
