"""Record of what a patch did to one model, and taking it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from ..attention import BackendChoice
from ..config.options import PatchOptions
from ..errors import UnsupportedModel
from ..kernels.lora import adapted_layers
from ..patches.base import DocumentPatch, Patch
from .parts import ModelParts
from .unpadding import Unpadding

# Attribute of the backbone that holds the state.
SLOT = "_trl_packfa"
# A module, the attribute that is set on it, and the attribute's value.
Edit: TypeAlias = tuple[nn.Module, str, Any]


@dataclass
class PatchState:
    """Record of what was done to one model, kept on the model's backbone, so that copies of the model carry it."""

    patch: Patch
    options: PatchOptions
    backends: BackendChoice
    parts: ModelParts
    # By class and mode, the names by which a mixer's own kernels provably honour boundaries.
    native: dict[tuple[type, bool], tuple[str, ...]] = field(default_factory=dict)
    adapted: list[nn.Module] = field(default_factory=list)
    # Each with the value that it replaced and its own, `None` for the value of the module's class.
    edits: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list)
    adapter_kinds: tuple[str, ...] = ()
    invocations: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unpadding: Unpadding | None = None
    # Why packed rows of text are not exact in a model with images or sounds, `None` if they are.
    packed_refusal: str | None = None
    # Result of the check of `unpad=True`: a `CheckReport`.
    unpadding_report: Any = None
    # Result of the check of packing, if `patch` had to make one: a `CheckReport`.
    report: Any = None

    def apply(self, module: nn.Module, slot: str, value: Any) -> None:
        """Make an edit, and keep the instance's own value; `None` says that the class's value was in use."""
        self.edits.append((module, slot, vars(module).get(slot), value))
        setattr(module, slot, value)

    def exchange_edits(self) -> None:
        """Give every edited attribute the value that it had before the last exchange, the last edit first.

        So one call undoes an applied patch, and the next one applies it again with all that was checked about it. A
        value that somebody else has set since then stays: TRL's LM head, accelerate's hook.
        """
        # Backwards, because a slot may be edited twice: a causal LM's forward is, for its head and for its arguments.
        self.edits.reverse()
        for i, (module, slot, other, own) in enumerate(self.edits):
            if vars(module).get(slot) is not own:
                continue
            self.edits[i] = (module, slot, own, other)
            if other is None:
                delattr(module, slot)
            else:
                setattr(module, slot, other)

    @property
    def is_applied(self) -> bool:
        """`True` while the model is patched so. Forwards that others have set keep ours inside after an undo."""
        return vars(self.parts.backbone).get(SLOT) is self

    @property
    def needs_whole_documents(self) -> str | None:
        """Reason why modules beside attention need the tokens of whole documents, `None` if they do not."""
        if isinstance(self.patch, DocumentPatch):
            return "the backbone runs document by document"
        if names := sorted({type(module).__name__ for module in self.parts.mixers.values()}):
            return f"documents run one by one in {', '.join(names)}"
        return "activated LoRA begins at the last invocation of a document" if self.invocations else None

    def require_shareable(self, model: nn.Module, size: int) -> None:
        """Raise [`UnsupportedModel`] with the reason if `size` processes cannot share a row of this model."""
        refusal = self.needs_whole_documents
        if self.patch.bias is not None:
            refusal = "its attention adds a bias to the scores, which is computed from the whole row"
        if refusal is not None:
            raise UnsupportedModel(
                f"{type(model).__name__} does not support sequence_parallel={size}.",
                why=[f"{refusal}, and each process holds only a part of the row's tokens"],
                do="Train this model with sequence_parallel=1, and shard its weights if they are too large "
                "(fsdp=True).",
            )


def find_state(model: nn.Module) -> PatchState | None:
    """Return the state of a patched model, `None` if it is not patched."""
    return next((vars(module)[SLOT] for module in model.modules() if SLOT in vars(module)), None)


def unpadding_of(model: nn.Module) -> Unpadding | None:
    """Return the policy of a model that is patched with `unpad=True`, `None` of any other."""
    state = find_state(model)
    return None if state is None else state.unpadding


def is_patched_with(model: nn.Module, options: PatchOptions, adapter_kinds: tuple[str, ...]) -> bool:
    """Tell whether a model is patched with these options, and with the adapters and LoRA layers that it has now."""
    state = find_state(model)
    if state is None or state.options != options or state.adapter_kinds != adapter_kinds:
        return False
    known = {id(layer) for layer in state.adapted}  # `add_adapter` replaces a linear layer under its name
    return not options.fused_kernels or all(id(layer) in known for layer in adapted_layers(model))


def undo_patch(model: nn.Module) -> None:
    """Take back every edit, the last one first; leave a model that is not patched as it is."""
    state = find_state(model)
    if state is None:
        return
    state.exchange_edits()
    for module in model.modules():
        vars(module).pop(SLOT, None)


def restore_patch(model: nn.Module, before: PatchState | None) -> None:
    """Patch a model again as it was patched before: `before` is what [`find_state`] found then."""
    if find_state(model) is before:
        return
    undo_patch(model)
    if before is not None:
        before.exchange_edits()
        setattr(before.parts.backbone, SLOT, before)


@contextmanager
def all_or_none(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore how each of these models was patched before, if a `with` block raises."""
    before = [(model, find_state(model)) for model in models]
    try:
        yield
    # Also after KeyboardInterrupt: a notebook goes on with the same model.
    except BaseException:
        for model, state in before:
            restore_patch(model, state)
        raise
