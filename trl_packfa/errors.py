"""What can go wrong, by name.

Every message has three parts: what failed (with the values), why (every reason), what to do. All of them are
`ValueError`s, so that a script that guards TRL's own configuration errors guards ours too.
"""

from collections.abc import Iterable

# What to do where nothing can be packed, whichever trainer, or `patch`, asks.
TRAIN_PADDED = "train padded, by TRL's own trainer or PackedSFTConfig(packing=False)"


class PackingError(ValueError):
    """Base of every error of trl-packfa that a user can act on.

    Attributes:
        what (`str`): what failed, with the values.
        why (`tuple[str, ...]`): every reason.
    """

    def __init__(self, what: str, *, why: Iterable[str] = (), do: str = "") -> None:
        self.what, self.why = what, tuple(why)
        lines = [what, *(f"  - {reason}" for reason in self.why)]
        if do:
            lines.append(do)
        super().__init__("\n".join(lines))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, torch's on a CPU and on an accelerator included."""
    named = type(error).__name__ == "OutOfMemoryError"  # torch is not imported for this
    return isinstance(error, MemoryError) or named or "DefaultCPUAllocator" in str(error)


class InvalidLayout(PackingError):
    """Document boundaries that contradict each other or the batch they came with."""


class NoBackend(PackingError):
    """No attention backend can serve the request, or the one named by the user cannot."""


class UnsupportedModel(PackingError):
    """The model has no patch, or cannot be made exact under packing."""


class ContaminationError(PackingError):
    """The exactness check saw a document change another document's result, or differ from itself alone."""


class InvalidDataset(PackingError):
    """A dataset that cannot be packed as asked: empty, wrong columns, documents too long."""


class InvalidConfig(PackingError):
    """Arguments that contradict each other."""


class NonFiniteLoss(PackingError):
    """The training loss is NaN or infinite."""


class VersionTooOld(PackingError):
    """An installed package is older than the API that trl-packfa needs."""


class CheckpointNotWritten(PackingError, OSError):
    """A checkpoint that could not be written, as the disk is full."""


class MissingPackage(PackingError):
    """An optional package that what was asked for needs; the message names the extra that installs it."""
