"""Compile for an H100 on a machine without a GPU. torch's inductor writes CUDA code and Triton compiles it to machine
code (cubins for sm_90); nothing is launched. torch and Triton see a device that does not exist. Dynamo and AOT trace
on the CPU. Then a graph's inputs become fake tensors on `cuda`, and inductor compiles for these. This needs a CUDA
build of torch."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import torch

SHARED_MEMORY = 232_448  # bytes that a block of an H100's threads can have
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=233_472, L2_cache_size=50 * 2**20, is_integrated=False, gcnArchName="", uuid="0",
)  # fmt: skip
# What torch.cuda says of the device.
_CUDA = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "_lazy_init": lambda: None,
    "synchronize": lambda device=None: None,
    "is_bf16_supported": lambda *args, **kwargs: True,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
    "set_device": lambda device: None,
    "mem_get_info": lambda device=None: (79 * 2**30, 80 * 2**30),
    "is_initialized": lambda: False,
    "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
    "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *args, **kwargs: None,
    "get_rng_state_all": lambda: [],
    "is_current_stream_capturing": lambda: False,
}


def unavailable() -> str | None:
    """Return the reason why nothing can be compiled here; `None` if everything can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA build, which compiling for a GPU needs"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available():
        return "a GPU is here: tests/test_gpu.py runs on it"
    return None


class Kernel(NamedTuple):
    """A compiled Triton kernel: its name, bytes of shared memory, and bytes of machine code."""

    name: str
    shared: int
    cubin: int


class Stop(Exception):
    """Exception that stops a call after compilation, before the first launch."""


class Rehearsal:
    """Record of the compiled passes (`"forward"`, `"backward"`) and kernels; `backend` is for `torch.compile`."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.passes: list[str] = []

    def backend(self, *, backward: bool):
        """Compile a graph as a backend of `torch.compile`, then raise [`Stop`]."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        forward = self._compiler("forward", is_last=not backward)
        return aot_autograd(
            fw_compiler=forward,
            bw_compiler=self._compiler("backward", is_last=True),
            inference_compiler=forward,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def _compiler(self, name, *, is_last):
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.virtualized import V

        def launch(arguments):
            raise Stop

        launch._boxed_call = True

        def compile_pass(graph, inputs):
            mode = torch._guards.detect_fake_mode(inputs) or torch._guards.TracingContext.get().fake_mode
            fakes = [_on_cuda(x, mode) for x in inputs]
            _move_constants(graph, mode)
            env = mode.shape_env
            with _cuda_is_here(), mode, nullcontext() if env is None else env.suppress_guards():
                _Propagate(graph).run(*fakes)
            with _cuda_is_here(), V.set_fake_mode(mode):
                compile_fx_inner(graph, fakes, is_backward=name == "backward")
            self.passes.append(name)
            if is_last:
                raise Stop
            return launch

        return compile_pass

    def note(self, autotuner):
        """Record the sizes of an autotuner's kernels instead of loading them."""
        for result in autotuner.compile_results:
            kernel = result.kernel
            shared = getattr(getattr(kernel, "metadata", None), "shared", getattr(kernel, "shared", 0))
            name = getattr(autotuner.fn, "__name__", "kernel")
            self.kernels.append(Kernel(name, shared, len(getattr(kernel, "asm", {}).get("cubin", b""))))
        autotuner.launchers = [object()]


def rehearse(call, *, backward: bool) -> Rehearsal:
    """Compile the function that `call` passes to the `torch.compile(backend=...)` it gets; nothing is launched.

    Raises:
        RuntimeError: if a pass did not compile; the compiler's error is its cause.
    """
    rehearsal = _CURRENT[0] = Rehearsal()
    torch._dynamo.reset()
    try:
        with torch.set_grad_enabled(backward):
            call(rehearsal.backend(backward=backward))
    except Exception as error:
        wanted = ["forward", "backward"][: 1 + backward]
        if rehearsal.passes[: len(wanted)] != wanted:
            raise RuntimeError(f"compiled {rehearsal.passes or 'nothing'}: {_first(error)}") from error
    finally:
        torch._dynamo.reset()
    return rehearsal


def compile_launches(monkeypatch, arch: int = 90) -> list[Kernel]:
    """Make each launch of a Triton kernel only compile it for an H100 (or `arch`), until the monkeypatch is undone.
    Returns the list of compiled kernels. This needs only Triton: tensors are on the CPU and keep their values."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Kernel] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(Kernel(self.__name__, kernel.metadata.shared, len(kernel.asm.get("cubin", b""))))
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", None, raising=False)
    driver.set_active(_Driver(arch))
    return compiled


_CURRENT = [Rehearsal()]


def _first(error):
    """Return the message of the innermost error on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


@contextmanager
def installed(monkeypatch):
    """Make torch and Triton see the device until the monkeypatch is undone."""
    import torch._dynamo.device_interface as interfaces
    import torch._functorch.config
    import torch._inductor.config as config
    import torch._inductor.fx_passes.fuse_attention as fuse_attention
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.misc_patterns as misc_patterns
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._inductor.runtime.triton_helpers as triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.nn.attention import flex_attention
    from triton.runtime import driver

    monkeypatch.setattr(interfaces, "DeviceGuard", _Guard)
    monkeypatch.setitem(interfaces.caching_worker_device_properties, "cuda", [_PROPERTIES])
    monkeypatch.setitem(interfaces.caching_worker_current_devices, "cuda", 0)
    cuda = interfaces.CudaInterface
    monkeypatch.setattr(cuda, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(cuda, "get_compute_capability", staticmethod(lambda device=None: 90))
    public = ("current_device", "device_count", "get_device_properties", "synchronize", "set_device", "current_stream")
    for name in (*public, "exchange_device", "maybe_exchange_device"):
        monkeypatch.setattr(cuda, name, staticmethod(_CUDA[name if name in public else f"_{name}"]))
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setattr(CachingAutotuner, "_make_launchers", lambda self: _CURRENT[0].note(self))
    monkeypatch.setattr(CachingAutotuner, "_dynamic_scale_rblock", lambda self: None)
    monkeypatch.setattr(CachingAutotuner, "_reload_kernel", None, raising=False)
    # These trace examples on the device, or time products there.
    nothing = lambda *args, **kwargs: None  # noqa: E731
    for module, name in ((fuse_attention, "_sfdp_init"), (joint_graph, "_sfdp_init"), (pad_mm, "_pad_mm_init"),
                         (misc_patterns, "_misc_patterns_init")):  # fmt: skip
        monkeypatch.setattr(module, name, nothing, raising=False)
    # The tensors that Dynamo sees are on a CPU, where flex_attention has no backward.
    monkeypatch.setattr(flex_attention, "_validate_device", nothing, raising=False)
    monkeypatch.setattr(driver, "_active", None, raising=False)
    driver.set_active(_Driver())
    settings = {"compile_threads": 1, "fx_graph_cache": False, "max_autotune": False, "shape_padding": False}
    settings["triton.cudagraphs"] = False
    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):  # keeps no machine code to look at
        if hasattr(config, name):
            settings[name] = False
    _forget_triton()
    try:
        # By torch's own means: pytest would delete the settings where it puts them back.
        with config.patch(settings), torch._functorch.config.patch(enable_autograd_cache=False):
            yield
    finally:
        _forget_triton()


def _forget_triton():
    """Let torch look for Triton and its devices anew: an earlier test, without the device, may have asked."""
    from torch.utils import _triton

    for function in vars(_triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextmanager
def _cuda_is_here():
    before = {name: getattr(torch.cuda, name) for name in _CUDA}
    for name, function in _CUDA.items():
        setattr(torch.cuda, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)


class _Guard:
    """Replacement of `torch.cuda.device` without a device."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class _Driver:
    """Triton driver of an H100 or another NVIDIA GPU that launches nothing."""

    launcher_cls = None

    def __init__(self, arch=90):
        self.arch = arch

    class utils:
        @staticmethod
        def get_device_properties(device=0):
            return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132, "max_num_regs": 65536,
                    "warpSize": 32, "sm_clock_rate": 1_980_000, "mem_clock_rate": 2_619_000,
                    "mem_bus_width": 5120}  # fmt: skip

        @staticmethod
        def load_binary(*args):
            return 0, 0, 0, 0, 1024

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self):
        return None

    def get_empty_cache_for_benchmark(self):
        return None

    def map_python_to_cpp_type(self, name):
        return name

    def is_active(self):
        return True


def _on_cuda(x, mode):
    """Return a graph's input as a fake tensor on the device; scalars that torch keeps on the host stay there."""
    if not isinstance(x, torch.Tensor) or (x.dim() == 0 and x.dtype == torch.float64):
        return x
    with mode:
        moved = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")
    return moved.requires_grad_(x.requires_grad).detach()


def _move_constants(graph, mode):
    """Move the tensors that a graph creates on the CPU to the device. The inputs of inner functions (score and mask
    functions) move too."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if module is not graph and isinstance(node.meta.get("val"), torch.Tensor):
                    node.meta["val"] = _on_cuda(node.meta["val"], mode)
                device = node.kwargs.get("device")
                if device is not None and torch.device(device).type == "cpu" and not node.kwargs.get("pin_memory"):
                    node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            module.recompile()


class _Propagate(torch.fx.Interpreter):
    """Interpreter that records the result of every node of a graph on the device."""

    def run_node(self, node):
        result = super().run_node(node)
        if "val" in node.meta or node.op != "output":
            node.meta["val"] = result
        node.meta.pop("tensor_meta", None)
        return result
