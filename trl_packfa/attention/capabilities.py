"""The interface of attention backends, and the constants that say which calls a backend supports.

Its refusals, the choice of a backend and the tests of both use these constants.

Shape letters: T packed tokens, M keys of all segments, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .base import AttentionCall, AttentionRequest

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The calls that a backend's kernels support.

    Args:
        function (`str`):
            Name of the function that computes attention, for refusals.
        needs_cuda (`bool`, *optional*, defaults to `False`):
            Whether it runs on CUDA and ROCm devices only.
        min_capability (`tuple[int, int]`, *optional*):
            The oldest CUDA compute capability that it runs on.
        dtypes (`tuple[torch.dtype, ...]`, *optional*):
            Supported data types of query, key and value; any by default.
        min_head_dim (`int`), max_head_dim (`int`, *optional*), head_dim_multiple (`int`):
            Supported head dims of queries and values.
        sliding_window, softcap, sinks, dropout, bias (`bool`, *optional*, default to `True`):
            Whether it supports this field of [`AttentionArguments`].
        is_selectable (`bool`, *optional*, defaults to `True`):
            Whether `"auto"` may choose it.
        cost_after_prefix (`float`, *optional*, defaults to `0.0`):
            Cost of a pair of query and key after a shared prefix, where a segment has more keys than queries,
            relative to a pair of a whole document. Where whole documents cost less, the queries of the prefix are
            computed again for each; with 0 they never are.
        bidirectional (`bool`, *optional*, defaults to `False`):
            Whether queries may see later keys too.
    """

    function: str
    needs_cuda: bool = False
    min_capability: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    min_head_dim: int = 1
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    sliding_window: bool = True
    softcap: bool = True
    sinks: bool = True
    dropout: bool = True
    bias: bool = True
    is_selectable: bool = True
    cost_after_prefix: float = 0.0
    bidirectional: bool = False

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List every reason why these constants exclude the request; empty if they do not."""
        return [*self._of_device(request), *self._of_shape(request), *self._of_arguments(request)]

    def _of_device(self, request: AttentionRequest) -> list[str]:
        if not self.needs_cuda:
            return []
        if request.device.type != "cuda":
            return [f"needs a CUDA or ROCm device, the model is on {request.device}"]
        if self.min_capability is None or torch.version.hip is not None:
            return []
        found = torch.cuda.get_device_capability(request.device)
        if found >= self.min_capability:
            return []
        return [f"needs compute capability {_dotted(self.min_capability)} or newer, this GPU has {_dotted(found)}"]

    def _of_shape(self, request: AttentionRequest) -> list[str]:
        reasons = []
        if self.dtypes is not None and request.dtype not in self.dtypes:
            reasons.append(f"needs {' or '.join(map(_name, self.dtypes))}, got {_name(request.dtype)}")
        step, most = self.head_dim_multiple, self.max_head_dim
        for name, dim in {"head_dim": request.head_dim, "value_dim": request.value_dim}.items():
            if dim is None:
                continue
            if (most is not None and dim > most) or dim % step:
                what = " ".join([f"a multiple of {step}"] * (step > 1) + [f"up to {most}"] * (most is not None))
                reasons.append(f"needs a {name} that is {what}, got {dim}")
            if dim < self.min_head_dim:
                reasons.append(f"needs a {name} of at least {self.min_head_dim}, got {dim}")
        return reasons

    def _of_arguments(self, request: AttentionRequest) -> list[str]:
        reasons = []
        if not request.causal and not self.bidirectional:
            reasons.append(f"{self.function} runs here for causal attention only")
        if request.sliding_window is not None and not self.sliding_window:
            reasons.append(f"{self.function} has no sliding window, the model asks for {request.sliding_window}")
        if request.bias and not self.bias:
            reasons.append(
                f"{self.function} cannot add a term to the scores, which sparse keys and position biases need"
            )
        if request.softcap is not None and not self.softcap:
            reasons.append(f"{self.function} has no softcap")
        if request.sinks and not self.sinks:
            reasons.append(f"{self.function} has no attention sinks")
        if request.dropout and not self.dropout:
            reasons.append(f"{self.function} has no dropout, the model asks for {request.dropout}")
        return reasons


class AttentionBackend(ABC):
    """An implementation of attention inside each segment of an `AttentionLayout`.

    Attributes:
        name (`str`): name that users pass to `backend=`.
        summary (`str`): one line that says how the backend computes attention and on which devices.
        capabilities ([`Capabilities`]): calls that the backend's kernels support.
    """

    name: str
    summary: str
    capabilities: Capabilities

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List every reason why this backend cannot serve the request; empty if it can.

        Reasons are limits of its capabilities and packages that are not installed.
        """
        return self.capabilities.refusals(request)

    def is_traceable(self, device: torch.device) -> bool:
        """Tell whether `torch.compile` can put the kernels for this device into a graph.

        Other kernels become one opaque operator in the graph.
        """
        return False

    @abstractmethod
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention inside each segment of `call.layout`.

        Shapes are `query` `(T, N, H)`, `key` and `value` `(M, K, H)`. M is T, unless documents share a prefix or
        tokens of a block see each other.

        Return `(T, N, H)` in the query's dtype.
        """


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
