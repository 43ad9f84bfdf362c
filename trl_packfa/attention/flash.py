"""Attention by the flash-attn packages (2, 3, 4), or by the Hub kernel that transformers loads instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import NoBackend
from ..layout import PackedLayout
from ..runtime.autocast import cast_to_autocast_dtype
from ..runtime.compile import constant_in_graphs
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
)
# FlashAttention 2's backward indexes its padded accumulator, (T + 128 * S) * N * H elements, with 32-bit integers
# (flash-attention issue 1311).
_PADDED_TOKENS_PER_DOCUMENT = 128
_MAX_ELEMENTS = 2**31


class _Kernel(NamedTuple):
    """A `flash_attn_varlen_func` and the names of its parameters.

    `is_traceable` says that its kernels are registered operators; `torch.compile` can put these into a graph.
    """

    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    parameters: frozenset[str]
    is_traceable: bool = True

    def name_of(self, *names: str) -> str | None:
        """Return the first of `names` that is a parameter. flash-attn 4 renamed some parameters of flash-attn 2."""
        found = [name for name in names if name in self.parameters]  # torch 2.7 cannot trace `next` with a default
        return found[0] if found else None


class _Package(NamedTuple):
    """A module with a `flash_attn_varlen_func`, for compute capabilities from `since` to below `until`."""

    module: str
    since: tuple[int, int]
    until: tuple[int, int] = (99, 0)
    is_traceable: bool = True


# The fastest package of a GPU comes first.
_PACKAGES = (
    # FlashAttention 3 uses Hopper's instructions, which no later GPU has.
    _Package("flash_attn_interface", (9, 0), (10, 0)),
    # FlashAttention 4 compiles at its first call, which Dynamo cannot trace. It is a beta, so 3 comes first on Hopper.
    _Package("flash_attn.cute", (9, 0), is_traceable=False),
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
            yield _kernel_of(function, is_traceable=package.is_traceable)


def _kernel_of(function: Callable[..., torch.Tensor], *, is_traceable: bool = True) -> _Kernel:
    return _Kernel(function, frozenset(inspect.signature(function).parameters), is_traceable)


# Kernels by compute capability. It is a global and no function cache, because compiled graphs read functions from
# globals only.
_KERNELS: dict[tuple[int, int], _Kernel | None] = {}


def _kernel(capability: tuple[int, int], *, named: bool = False) -> _Kernel | None:
    """Return the kernel for GPUs of this capability. `named` says that the user chose the backend by name."""
    if capability not in _KERNELS:
        _KERNELS[capability] = next(_installed(capability), None)
    if named and _KERNELS[capability] is None and find_spec("kernels") is not None:
        # The Hub's kernel is downloaded code from others, so only users who name this backend get it.
        from ..runtime.hub_kernel import hub_flash_attn_varlen_func

        function = hub_flash_attn_varlen_func()
        _KERNELS[capability] = None if function is None else _kernel_of(function)
    return _KERNELS[capability]


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
        return reasons

    def is_traceable(self, device: torch.device) -> bool:
        """Tell whether the package for this device registers its kernels as operators."""
        kernel = _kernel(_capability(device))
        return kernel is not None and kernel.is_traceable

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention, see [`AttentionBackend`]."""
        kernel = _kernel(_capability(query.device))
        assert kernel is not None, "refusals() was not asked"
        value_dim = value.shape[-1]
        query, key, value = equally_wide(*cast_to_autocast_dtype(query, key, value))
        queries, keys = call.layout.queries, call.layout.keys
        require_indexable(query, keys, self.name)
        sinks, side = call.sinks, None if call.sliding_window is None else call.sliding_window - 1
        options = {
            "window_size": None if side is None else (side, 0 if call.layout.causal else side),
            "softcap": call.softcap,
            # Under autocast the sinks may be float32, but these kernels accept half precision only.
            kernel.name_of("s_aux", "learnable_sink"): None if sinks is None else sinks.to(query.dtype),
            "dropout_p": call.dropout or None,
        }
        # The user asks for deterministic gradients by torch's setting, or by flash-attn's variable.
        asked = torch.are_deterministic_algorithms_enabled() or os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"
        if asked and kernel.name_of("deterministic") is not None:
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


def require_indexable(query: torch.Tensor, layout: PackedLayout, backend: str) -> None:
    """Raise [`NoBackend`] for a batch that overflows the 32-bit index of FlashAttention 2's backward.

    Gradients would be wrong without an error.
    """
    _, num_heads, head_dim = query.shape
    padded = layout.num_tokens + _PADDED_TOKENS_PER_DOCUMENT * layout.num_documents
    if query.requires_grad and padded * num_heads * head_dim >= _MAX_ELEMENTS:
        raise NoBackend(
            f"attention backend '{backend}' cannot index this batch: {layout.num_tokens} tokens in "
            f"{layout.num_documents} documents, {num_heads} heads of {head_dim}.",
            why=[
                f"(tokens + 128 * documents) * heads * head_dim is {padded * num_heads * head_dim}, "
                "but must be less than 2^31"
            ],
            do="Lower per_device_train_batch_size or max_length, or choose attention_backend='flex' or 'sdpa'.",
        )
