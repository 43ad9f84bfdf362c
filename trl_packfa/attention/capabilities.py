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
_TOO_LARGE = (
    "cannot index the gradients of so large a batch: (tokens + 128 * documents) * heads * head_dim, rounded up to 32, "
    "must be less than 2^31 (lower max_length or the batch size)"
)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The calls that a backend's kernels support."""

    function: str  # that computes attention, for refusals
    needs_cuda: bool = False  # it runs on CUDA and ROCm devices only
    min_capability: tuple[int, int] | None = None  # the oldest CUDA compute capability that it runs on
    dtypes: tuple[torch.dtype, ...] | None = None  # of query, key and value; any by default
    # Head dims of queries and values.
    min_head_dim: int = 1
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    # Fields of `AttentionArguments` that it supports.
    sliding_window: bool = True
    softcap: bool = True
    sinks: bool = True
    dropout: bool = True
    bias: bool = True
    is_selectable: bool = True  # `"auto"` may choose it
    # Cost of a pair of query and key after a shared prefix, where a segment has more keys than queries, relative to a
    # pair of a whole document. Where whole documents cost less, the queries of the prefix are computed again for each;
    # with 0 they never are.
    cost_after_prefix: float = 0.0
    bidirectional: bool = False  # queries may see later keys too
    any_size: bool = True  # its backward indexes any batch; FlashAttention 2's has 32 bits (`exceeds_int32`)

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
        oldest, here = (".".join(map(str, capability)) for capability in (self.min_capability, found))
        return [f"needs compute capability {oldest} or newer, this GPU has {here}"]

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
        window = request.sliding_window
        needs = (
            (not request.causal, self.bidirectional, "runs here for causal attention only"),
            (request.exceeds_int32, self.any_size, _TOO_LARGE),
            (window is not None, self.sliding_window, f"has no sliding window, the model asks for {window}"),
            (request.bias, self.bias, "cannot add a term to the scores, which sparse keys and position biases need"),
            (request.softcap is not None, self.softcap, "has no softcap"),
            (request.sinks, self.sinks, "has no attention sinks"),
            (request.dropout, self.dropout, f"has no dropout, the model asks for {request.dropout}"),
        )
        return [f"{self.function} {lacks}" for is_needed, is_there, lacks in needs if is_needed and not is_there]


class AttentionBackend(ABC):
    """An implementation of attention inside each segment of an `AttentionLayout`."""

    name: str  # that users pass to `backend=`
    summary: str  # how it computes attention and on which devices, in one line
    capabilities: Capabilities

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List every limit and every missing package for which this backend cannot serve the request."""
        return self.capabilities.refusals(request)

    def is_traceable(self, device: torch.device) -> bool:
        """Tell whether `torch.compile` can put the kernels for this device into a graph.

        Other kernels become one opaque operator in the graph.
        """
        return False

    def kernels(self, request: AttentionRequest) -> str:
        """Return the name of the kernels that serve the request, where a backend has several; else `""`."""
        return ""

    @abstractmethod
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention inside each segment of `call.layout`.

        Shapes are `query` `(T, N, H)`, `key` and `value` `(M, K, H)`. M is T, unless documents share a prefix or
        tokens of a bidirectional span see each other.

        Return `(T, N, H)` in the query's dtype.
        """


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
