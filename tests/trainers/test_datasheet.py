"""What devices multiply at most, by name, and how a rate is timed where no data sheet is known."""

from types import SimpleNamespace

import pytest
import torch

from trl_packfa.data import flops
from trl_packfa.trainers.sft import throughput
from trl_packfa.trainers.sft.datasheet import datasheet_flops, named_flops


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H200", 989),
    ("NVIDIA H200 NVL", 835),
    ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA A100-PCIE-40GB", 312),
    ("NVIDIA L4", 121),
    ("NVIDIA L40S", 362),
    ("AMD Instinct MI300X", 1307.4),
    ("NVIDIA L40", None),
    ("NVIDIA GH200 480GB", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("NVIDIA GeForce RTX 4090", None),
])  # fmt: skip
def test_devices_are_known_by_their_names(name, tflops):
    assert named_flops(name) == (None if tflops is None else tflops * 1e12)


def test_only_half_precision_on_cuda_has_a_data_sheet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda", 0)
    assert datasheet_flops(gpu, torch.bfloat16) == datasheet_flops(gpu, torch.float16) == 989e12
    assert datasheet_flops(gpu, torch.float32) is None
    assert datasheet_flops(torch.device("cpu"), torch.bfloat16) is None


def test_calls_are_timed_with_the_threads_of_the_run():
    threads, calls = torch.get_num_threads(), []
    assert flops.best_seconds(lambda: calls.append(torch.get_num_threads()), seconds=1e-4) > 0
    assert set(calls) == {threads}


@pytest.mark.parametrize(("device", "rows"), [("cpu", 2048), ("cuda", 8192)])
def test_a_gpu_is_given_as_many_rows_as_fill_it(device, rows, monkeypatch):
    asked = []
    monkeypatch.setattr(throughput, "matmul_flops", lambda *shape, **options: asked.append(shape) or 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=64, intermediate_size=[128, 256]))
    args = SimpleNamespace(peak_tflops=None, device=torch.device(device), bf16=True, fp16=False)
    throughput.peak_flops(config, args)
    assert asked == [(rows, 64, 256)]
