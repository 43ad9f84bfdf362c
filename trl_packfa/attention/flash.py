"""Attention by the flash-attn packages (2, 3, 4), or by the Hub kernel that transformers loads instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..autocast import cast_to_autocast_dtype
from ..compile import constant_in_graphs
from .base import AttentionCall, AttentionRequest
from .capabilities import HALF, AttentionBackend, Capabilities

# Capabilities of all FlashAttention kernels. The arguments of their functions differ.
FLASH = Capabilities(
    function="flash_attn_varlen_func",
    needs_cuda=True,
    min_capability=(8, 0),
    dtypes=HALF,
    max_head_dim=256,
    head_dim_multiple=8,
    bias=False,
    bidirectional=True,
    any_size=False,
)


class _Kernel(NamedTuple):
    """A `flash_attn_varlen_func`, the names of its parameters, and the version of FlashAttention.

    `is_traceable` says that its kernels are registered operators; `torch.compile` can put these into a graph. `widest`
    is its largest head dim; `pair` is one of head dim and value dim that it takes beyond that, without padded values.
    """

    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    parameters: frozenset[str]
    version: str = "2"
    is_traceable: bool = True
    widest: int = 256
    pair: tuple[int, int] | None = None

    def name_of(self, *names: str) -> str | None:
        """Return the first of `names` that is a parameter. flash-attn 4 renamed some parameters of flash-attn 2."""
        found = [name for name in names if name in self.parameters]  # torch 2.7 cannot trace `next` with a default
        return found[0] if found else None


class _Package(NamedTuple):
    """A module with a `flash_attn_varlen_func`, for compute capabilities from `since` to below `until`."""

    module: str
    since: tuple[int, int]
    until: tuple[int, int] = (99, 0)
    limits: dict[str, Any] = {}


# The fastest package of a GPU comes first.
_PACKAGES = (
    # FlashAttention 3 uses Hopper's instructions, which no later GPU has.
    _Package("flash_attn_interface", (9, 0), (10, 0), {"version": "3"}),
    # FlashAttention 4 compiles at its first call, which Dynamo cannot trace. It is a beta, so 3 comes first on Hopper.
    # The pair is that of multi-head latent attention (DeepSeek).
    _Package(
        "flash_attn.cute",
        (9, 0),
        limits={"version": "4", "is_traceable": False, "widest": 128, "pair": (192, 128)},
    ),
    _Package("flash_attn", (8, 0)),
)
# Import errors of installed packages by package name, for example of a package that was built for another torch.
_BROKEN: dict[str, str] = {}


def _installed(capability: tuple[int, int]) -> Iterator[_Kernel]:
    """Yield the kernels of the installed packages that are meant for this GPU."""
    for package in _PACKAGES:
        name = package.module.split(".")[0]
        if package.since <= capability < package.until and find_spec(name) is not None:
            try:
                function = import_module(package.module).flash_attn_varlen_func
            except AttributeError:
                continue  # another package with the same module name
            except (ImportError, OSError, RuntimeError) as error:
                if getattr(error, "name", None) != package.module:  # flash-attn 2 has no `cute`
                    _BROKEN[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            yield _kernel_of(function, **package.limits)


def _kernel_of(function: Callable[..., torch.Tensor], **limits: Any) -> _Kernel:
    return _Kernel(function, frozenset(inspect.signature(function).parameters), **limits)


# Installed kernels by compute capability, and the Hub's. It is a global and no function cache, because compiled graphs
# read functions from globals only.
_KERNELS: dict[tuple[int, int] | str, _Kernel | None] = {}
_HUB = "hub"


def _kernel(capability: tuple[int, int], *, named: bool = False) -> _Kernel | None:
    """Return the kernel for GPUs of this capability, for a user who chose the backend by name that of the Hub, too."""
    if capability not in _KERNELS:
        _KERNELS[capability] = next(_installed(capability), None)
    if not named or _KERNELS[capability] is not None:
        return _KERNELS[capability]
    if _HUB not in _KERNELS:
        # It is downloaded code from others. `auto` never gets it, also in a process that has loaded it.
        from ..hub_kernel import hub_flash_attn_varlen_func

        function = None if find_spec("kernels") is None else hub_flash_attn_varlen_func()
        _KERNELS[_HUB] = None if function is None else _kernel_of(function, version="2, from the Hub")
    return _KERNELS[_HUB]


def _missing() -> list[str]:
    broken = [f"{package} is installed but cannot be imported ({said})" for package, said in _BROKEN.items()]
    if not broken:
        return [
            "needs the flash-attn package (pip install flash-attn), or the kernels package with "
            "attention_backend='flash', which loads a kernel from the Hub"
        ]
    built = "install a flash-attn that is built for torch " + torch.__version__
    return [*broken, f"{built} (pip install --no-build-isolation --force-reinstall --no-deps flash-attn)"]


@constant_in_graphs
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the device's compute capability. ROCm devices count as Ampere, as in flash-attn's builds."""
    return (8, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


class FlashBackend(AttentionBackend):
    """Attention backend of FlashAttention 2, 3 or 4."""

    name = "flash"
    summary = "flash-attn 2, 3 or 4, or the Hub kernel transformers loads; CUDA and ROCm, float16 and bfloat16"
    capabilities = FLASH

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List its limits, a missing package, and missing arguments of the installed version."""
        reasons = self.capabilities.refusals(request)
        if request.device.type != "cuda":
            return reasons
        kernel = _kernel(_capability(request.device), named=request.named)
        if kernel is None:
            return [*reasons, *_missing()]
        wanted = {
            "sliding windows": (request.sliding_window, ("window_size",)),
            "softcap": (request.softcap, ("softcap",)),
            "attention sinks": (request.sinks or None, ("s_aux", "learnable_sink")),
            "dropout": (request.dropout or None, ("dropout_p",)),
        }
        for feature, (value, names) in wanted.items():
            if value is not None and kernel.name_of(*names) is None:
                reasons.append(f"this flash-attn's flash_attn_varlen_func has no {feature}")
        widths = (request.head_dim, request.value_dim or request.head_dim)
        if max(widths) > kernel.widest and widths != kernel.pair:
            but = "" if kernel.pair is None else " (or {} with values of {})".format(*kernel.pair)
            reasons.append(
                f"FlashAttention {kernel.version} needs heads of up to {kernel.widest}{but}, got {max(widths)}"
            )
        return reasons

    def is_traceable(self, device: torch.device) -> bool:
        """Tell whether the package for this device registers its kernels as operators."""
        return self._chosen(device).is_traceable

    def kernels(self, request: AttentionRequest) -> str:
        """Return which FlashAttention serves the request."""
        return f"FlashAttention {self._chosen(request.device).version}"

    def _chosen(self, device: torch.device) -> _Kernel:
        """Return the kernel of this device, after [`FlashBackend.refusals`] has found it."""
        # Where nothing is installed, only a user who named this backend has come so far.
        kernel = _kernel(_capability(device), named=True)
        assert kernel is not None, "refusals() was not asked"
        return kernel

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention, see [`AttentionBackend`]."""
        kernel = self._chosen(query.device)
        value_dim = value.shape[-1]
        query, key, value = cast_to_autocast_dtype(query, key, value)
        if (query.shape[-1], value_dim) != kernel.pair:
            query, key, value = equally_wide(query, key, value)
        queries, keys = call.layout.queries, call.layout.keys
        sinks, side = call.sinks, None if call.sliding_window is None else call.sliding_window - 1
        options = {
            "window_size": None if side is None else (side, 0 if call.layout.causal else side),
            "softcap": call.softcap,
            # Under autocast the sinks may be float32, but these kernels accept half precision only.
            kernel.name_of("s_aux", "learnable_sink"): None if sinks is None else sinks.to(query.dtype),
            "dropout_p": call.dropout or None,
        }
        # The user asks for deterministic gradients by torch's setting, or by flash-attn's variable.
        by_variable = os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"
        deterministic = by_variable or torch.are_deterministic_algorithms_enabled()
        if deterministic and kernel.name_of("deterministic") is not None:
            options["deterministic"] = True
        result = kernel.function(
            query,
            key,
            value,
            # With more keys than queries, the kernels align both at the end of the segment.
            cu_seqlens_q=queries.cu_seqlens,
            cu_seqlens_k=keys.cu_seqlens,
            max_seqlen_q=queries.max_seqlen,
            max_seqlen_k=keys.max_seqlen,
            softmax_scale=call.scaling,
            causal=call.layout.causal,
            **{name: option for name, option in options.items() if option is not None},
        )
        out = result[0] if isinstance(result, tuple) else result  # flash-attn 3 and 4 may add the log-sum-exp
        return out[..., :value_dim]


def equally_wide(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad query `(T, N, H)`, key and value `(T, K, H)` with zeros to the larger head dim of both.

    These kernels support one head dim only. Zeros change no score, and they make the last features of the result zero.
    """
    # In multi-head latent attention, queries and keys of 192 and values of 128 features become 192 and 192.
    width = max(query.shape[-1], value.shape[-1])
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    return q, k, v
