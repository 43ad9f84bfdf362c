"""The errors of trl-packfa.

Every message has three parts: what failed (with the values), why (every reason), and what to do. All errors are
`ValueError`s, so that a script that catches TRL's configuration errors catches ours too.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Figure = TypeVar("Figure")

# The advice of every message about a model or dataset that cannot be packed.
TRAIN_PADDED = "train padded, by TRL's own trainer or PackedSFTConfig(packing=False)"
# The same for models in float8: torchao's recipe that scales each token by itself.
ROWWISE = "convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name('rowwise')) of torchao.float8"


class PackingError(ValueError):
    """Base class of every error of trl-packfa that a user can act on.

    Attributes:
        what (`str`): what failed, with the values.
        why (`tuple[str, ...]`): every reason.
        do (`str`): the remedy.
    """

    def __init__(self, what: str, *, why: Iterable[str] = (), do: str = "") -> None:
        self.what, self.why, self.do = what, tuple(why), do
        lines = [what, *(f"  - {reason}" for reason in self.why)]
        if do:
            lines.append(do)
        super().__init__("\n".join(lines))


def shown(numbers: Sequence[int]) -> str:
    """Return numbers as text for a message, at most eight of them."""
    return f"[{', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}]"


def differing(one: Sequence[int], other: Sequence[int]) -> str:
    """Return the part in which two sequences of numbers differ, as text for a message."""
    pairs = enumerate(zip(one, other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    where = f" (from number {first + 1} of {len(one)} on)" if first else ""
    return f"{shown(one[first:])} and {shown(other[first:])}{where}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, after its type unless the error is this library's."""
    line = (str(error).strip() or "no message").splitlines()[0]
    return line if isinstance(error, PackingError) else f"{type(error).__name__}: {line}"


def figure(name: str) -> Callable[[Callable[Arguments, Figure]], Callable[Arguments, Figure | None]]:
    """Decorate a function that only informs: it returns `None`, with one line in the log, where it would raise.

    No figure of a log, estimate or report may end a run: it reads sizes that a model, a batch or a device of another
    kind may not have. `name` says in the log what is missing.
    """

    def decorated(count: Callable[Arguments, Figure]) -> Callable[Arguments, Figure | None]:
        @wraps(count)
        def counted(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Figure | None:
            try:
                return count(*args, **kwargs)
            except Exception as error:  # whatever the code of a model, a tokenizer or a device raises
                _tell_missing(name, first_line(error))
                return None

        return counted

    return decorated


@cache
def _tell_missing(name: str, why: str) -> None:
    """Log once in a process that a figure is missing."""
    logger.info("trl-packfa: no %s: %s", name, why)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means out of memory: Python's, or torch's on a CPU or on an accelerator."""
    named = type(error).__name__ == "OutOfMemoryError"  # torch is not imported for this
    return isinstance(error, MemoryError) or named or "DefaultCPUAllocator" in str(error)


class InvalidLayout(PackingError):
    """Document boundaries that contradict each other or their batch."""


class NoBackend(PackingError):
    """An attention call that no backend can serve, or not the backend that the user named."""


class UnsupportedModel(PackingError):
    """The model has no patch, or cannot be made exact under packing."""


class ContaminationError(PackingError):
    """A check found that packed results are not exact, or could not run.

    One cause is a document whose result depends on other documents of its row.
    """


class InvalidDataset(PackingError):
    """A dataset that cannot be packed as asked: empty, wrong columns, documents too long."""


class InvalidConfig(PackingError):
    """Arguments that contradict each other."""


class NonFiniteLoss(PackingError):
    """The training loss is NaN or infinite."""


class VersionTooOld(PackingError):
    """An installed package is older than the API that trl-packfa needs."""


class CheckpointNotWritten(PackingError, OSError):
    """A checkpoint that could not be written, for example because the disk is full."""


class MissingPackage(PackingError):
    """An optional package that is needed but not installed; the message names the extra that installs it."""
