"""Kernels, models and training runs on a GPU: every backend that runs there. Skipped where there is none, with the
backend's reason; the same lines run on a CPU, with the backends that it has. On a GPU: `pytest -n 12
tests/test_gpu.py`, some minutes (flex and inductor compile)."""

import battery
import pytest
import tiny
import tolerance
import torch
from battery import KernelCase, batch_on, logits_and_gradients, patched_model, require_device
from oracle import attention, attention_of_documents
from selection import exhaustive
from tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, assert_low_precision, assert_recomputed, differs
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from training import AfterEachStep, arguments, dataset, losses, packed_trainer, trained
from trl import SFTConfig, SFTTrainer
from trl.kernels import ChunkedLogProbFunction

from trl_packfa import check, describe
from trl_packfa.attention import BACKENDS, get_backend
from trl_packfa.bench.measuring import compiled_graphs
from trl_packfa.kernels.liger import liger_unavailable
from trl_packfa.kernels.lm_head.chunked import LogProbs, Transform

ON_GPU = [backend.name for backend in BACKENDS if backend.name != "reference"]
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


def places(*on_gpu, cpu=("sdpa",), on_cpu_marks=()):
    tried = [("cpu", name, on_cpu_marks) for name in cpu] + [("cuda", name, pytest.mark.gpu) for name in on_gpu]
    cases = [pytest.param(device, name, marks=marks, id=f"{device}-{name}") for device, name, marks in tried]
    return pytest.mark.parametrize(("device", "backend"), cases)


@pytest.fixture
def deterministic(monkeypatch):
    """FlashAttention's backward sums queries in any order, unless torch asks for the same order in every run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case_on(device, backend, name, dtype):
    require_device(device, backend, dtype)
    if device == "cpu" and sum(battery.KERNEL_CASES[name][0]) > 2000:
        pytest.skip("quadratic in float64: on a GPU only")
    case = KernelCase(name, device, dtype)
    return case, case.backend(backend), case.tensors()


@DTYPES
@pytest.mark.parametrize("name", battery.KERNEL_CASES)
@places(*ON_GPU, on_cpu_marks=pytest.mark.slow)
def test_kernels_against_float64(device, backend, name, dtype):
    case, attend, tensors = case_on(device, backend, name, dtype)
    ours, exact = case.run(attend, tensors), case.run_exactly(tensors)
    with torch.no_grad():
        ours_without_gradients = attend(*tensors[:3], case.call(tensors))
    if dtype is FP32:
        for found, expected in zip([*ours, ours_without_gradients], [*exact, exact[0]], strict=True):
            assert_recomputed(found, expected)
        return
    eager = case.run(get_backend("reference"), tensors)
    factors = [FORWARD_FACTOR] + [GRADIENT_FACTOR] * len(tensors)
    for found, theirs, expected, factor in zip(ours, eager, exact, factors, strict=True):
        assert_low_precision(found, theirs, expected, factor=factor)
    assert_low_precision(ours_without_gradients, eager[0], exact[0], factor=FORWARD_FACTOR)


@pytest.mark.parametrize("name", [name for name, case in battery.KERNEL_CASES.items() if len(case[0]) > 1])
@places(*ON_GPU)
def test_a_document_replaced_moves_no_other_by_a_bit(device, backend, name, deterministic):
    case, attend, tensors = case_on(device, backend, name, BF16)
    after, others = case.replace_longest(tensors)
    results = [case.run(attend, given)[:4] for given in (tensors, after)]
    for before, now in zip(*results, strict=True):
        assert torch.equal(before[others], now[others])
    assert differs(results[1][0][~others], results[0][0][~others]), "the change must be one"


@pytest.mark.parametrize("options", [{}, {"sliding_window": 8}, {"softcap": 3.0, "sinks": torch.linspace(-1, 1, 4)}])
def test_the_formula_of_documents_is_the_loop_over_queries(options):
    """The control is one document."""
    qkv = [torch.randn(sum(battery.SHORT), heads, 16) for heads in (4, 2, 2)]
    expected = attention(*qkv, battery.SHORT, scaling=0.3, **options)
    tolerance.assert_float32(attention_of_documents(*qkv, battery.SHORT, scaling=0.3, **options), expected)
    assert differs(attention_of_documents(*qkv, (len(qkv[0]),), scaling=0.3, **options), expected)


@DTYPES
@pytest.mark.parametrize("architecture", [name for name in tiny.ARCHITECTURES if name != "llama-dynamic"])
@places("auto", *ON_GPU, cpu=())
def test_every_backend_is_exact(device, backend, architecture, dtype):
    model = patched_model(architecture, device, dtype, backend)
    report = check(model)
    assert report.is_exact, str(report)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("nf4", [False, True], ids=["plain", "NF4"])
@places(*ON_GPU)
def test_fused_lora_is_exact(device, backend, nf4, autocast):
    """In bfloat16, and with float32 weights under autocast, TRL's default; over plain and over 4-bit weights."""
    dtype = FP32 if autocast else BF16
    model = patched_model("llama", device, dtype, backend, lora=True, nf4=nf4, autocast=autocast, layers=2)
    assert battery.was_fused(model)
    with torch.autocast(device, BF16, enabled=autocast):
        report = check(model)
    assert report.is_exact, str(report)


@pytest.mark.parametrize(("architecture", "lora", "nf4"), [
    *[(name, lora, False) for name in ("llama", "qwen3", "phi3") for lora in (False, True)],
    ("llama", True, True),
])  # fmt: skip
@places("auto", cpu=("auto",))
def test_fused_kernels_are_the_models_own_and_pefts(device, backend, architecture, lora, nf4):
    """Logits and every gradient, float32; Liger's on a GPU."""
    models = [patched_model(architecture, device, FP32, backend, lora=lora, nf4=nf4, kernels=kernels, layers=2)
              for kernels in (True, False)]  # fmt: skip
    assert [battery.was_fused(model) for model in models] == [lora, False]
    if device == "cuda" and liger_unavailable() is None:
        assert "x RMSNorm: liger-kernel" in describe(models[0]) and "x rotation: liger-kernel" in describe(models[0])
    found = [logits_and_gradients(model, batch_on(device, (60, 3, 20, 31))) for model in models]
    for fused, own in zip(*found, strict=True):
        assert_recomputed(fused, own.double())


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@DTYPES
@places("auto", cpu=("auto",))
def test_a_head_frozen_or_trained_is_trl_s(device, backend, dtype, trains):
    """Against the logits in float64, beside TRL's."""
    require_device(device, backend, dtype)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(device, dtype) for n in (700, 5000))
    labels = torch.randint(5000, (700,), generator=generator).to(device)
    ways = {
        "ours": lambda h, w: LogProbs.apply(h, w, None, labels, Transform(), True)[0],
        "trl": lambda h, w: ChunkedLogProbFunction.apply(h, w, None, labels, 1.0, 512)[0],
        "oracle": lambda h, w: torch.log_softmax(h @ w.t(), -1).gather(-1, labels[:, None])[:, 0],
    }
    found = []
    for name, log_probs_of in ways.items():
        kind = torch.float64 if name == "oracle" else dtype
        h, w = hidden.to(kind, copy=True).requires_grad_(), weight.to(kind, copy=True).requires_grad_(trains)
        log_probs = log_probs_of(h, w)
        grads = torch.autograd.grad(log_probs, (h, w)[: 1 + trains], torch.full_like(log_probs, 1e-3))
        found.append((log_probs.detach(), *(grad * 1e3 for grad in grads)))
    for ours, trls, exact in zip(*found, strict=True):
        assert_low_precision(ours, trls, exact, factor=FORWARD_FACTOR)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@places("flash", "varlen", "flex")
def test_no_forward_waits_for_the_device(device, backend, lora):
    """With boundaries that no kernel has met: what is derived from them is kept for the layers of a batch."""
    model = patched_model("llama", device, BF16, backend, lora=lora)
    model(**batch_on(device, (21, 30, 1))).logits.sum().backward()
    batch = batch_on(device, (3, 40, 9))
    with battery.no_waits(device):
        model(**batch).logits.sum().backward()


@pytest.mark.parametrize("lora", [True, *exhaustive(False)], ids=["LoRA", "full"])
@places("flash", "varlen", "flex", on_cpu_marks=pytest.mark.slow)
def test_a_backbone_is_compiled_once(device, backend, lora):
    """No batch after the second compiles anything. flex's own graphs are counted with the backbone's: other sizes are
    one more of each at most."""
    model = patched_model("llama", device, BF16, backend, lora=lora, layers=2)
    seen = battery.graphs_after_each_batch(model, device)
    assert seen[1] == seen[-1] or (backend == "flex" and seen[-2] == seen[-1]), seen
    assert backend == "flex" or seen[-1] == 2, "backbone and head"
    report = check(torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager"))
    assert report.is_exact, str(report)


STEPS = 10


def built(cls, config, device, dtype, out, **options):
    args = arguments(config, out, max_steps=STEPS, use_cpu=device == "cpu", bf16=dtype is BF16, max_length=96,
                     learning_rate=1e-4, **options)  # fmt: skip
    if cls is None:
        return packed_trainer(args, train_dataset=dataset(100), peft_config=None)
    return cls(tiny.model(layers=2), args, train_dataset=dataset(100), processing_class=tiny.tokenizer())


def train(*given, **options):
    return losses(trained(built(*given, **options)))


@DTYPES
@places("auto", "sdpa", cpu=("auto",))
def test_ten_steps_have_trl_s_losses(device, backend, dtype, tmp_path):
    """TRL's padded run, its LM head on both sides."""
    require_device(device, "varlen" if backend == "auto" else backend, dtype)
    options = {"packing_strategy": "step", "attention_backend": backend, "use_peft": False}
    ours = train(None, type(arguments()), device, dtype, tmp_path / "ours", **options)
    padded = train(SFTTrainer, SFTConfig, device, dtype, tmp_path / "padded", packing=False)
    tolerance.assert_trajectory(ours, padded, dtype=dtype)
    assert len(set(ours)) > STEPS // 2, "it trains"


@DTYPES
@places("auto", "sdpa", cpu=("auto",))
def test_ten_steps_of_bfd_have_trl_s_losses(device, backend, dtype, tmp_path):
    """Its batches are no padded run's: TRL's own trainer is handed each micro-batch's documents, padded."""
    require_device(device, "varlen" if backend == "auto" else backend, dtype)
    options = {"packing_strategy": "bfd", "attention_backend": backend, "use_peft": False}
    options["per_device_train_batch_size"] = 1
    trainer = built(None, type(arguments()), device, dtype, tmp_path / "ours", **options)
    batches, step = [], trainer.training_step

    def remember(model, inputs, *args):
        batches.append(battery.padded_documents(inputs))
        return step(model, inputs, *args)

    trainer.training_step = remember
    trainer.train()

    class Padded(SFTTrainer):
        def get_train_dataloader(self):
            return DataLoader(batches, batch_size=None)

    padded = train(Padded, SFTConfig, device, dtype, tmp_path / "padded", packing=False)
    assert max(len(batch["labels"]) for batch in batches) > 1, "rows of several documents"
    tolerance.assert_trajectory(losses(trainer), padded, dtype=dtype)


@places("flash", "varlen", "flex", cpu=("sdpa",))
def test_a_compiled_run_has_the_losses_of_one_that_is_not(device, backend, tmp_path):
    """`torch_compile=True`; no step after the second compiles anything, but for a size or two of flex's own graphs."""
    require_device(device, backend)
    options = {"packing_strategy": "step", "attention_backend": backend, "use_peft": False, "check_packing": False}
    given = (None, type(arguments()), device, BF16)
    compiles = {"torch_compile": True, "torch_compile_backend": "inductor" if device == "cuda" else "eager"}
    seen, trainer = [], built(*given, tmp_path / "compiled", **options, **compiles)
    trainer.add_callback(AfterEachStep(lambda: seen.append(compiled_graphs())))
    trainer.train()
    assert seen[1] == seen[-1] or (backend == "flex" and seen[-3] == seen[-1]), seen
    assert seen[0] > 0, "it is compiled"
    expected = train(*given, tmp_path / "not", **options)
    tolerance.assert_trajectory(losses(trainer), expected, dtype=BF16)


@places("auto", cpu=("auto",))
def test_ddp_of_one_process(device, backend, tmp_path):
    require_device(device, "varlen")
    model = patched_model("llama", device, FP32, backend, layers=2)
    batch = batch_on(device, (21, 30, 1))
    expected = logits_and_gradients(model, batch)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        found = logits_and_gradients(DistributedDataParallel(model), batch)
    finally:
        distributed.destroy_process_group()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@places("flash", "varlen", "flex", cpu=())
def test_heads_past_256_are_refused(device, backend):
    require_device(device, backend)
    with pytest.raises(pytest.skip.Exception, match="512"):
        KernelCase("heads of 512", device, BF16).backend(backend)
