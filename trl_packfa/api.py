"""The public functions `patch`, `unpatch` and `patched`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from .adapters import verdicts_on
from .candidates import apply_first_exact
from .config.options import PatchOptions
from .kernels.lm_head.chunked import undo_head
from .patching.inspect import Target, inner_model
from .patching.state import all_or_none, find_state, is_patched_with, restore_patch, undo_patch
from .versions import tell_of_newer_versions

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    backend: str = PatchOptions.backend,
    fused_kernels: bool = PatchOptions.fused_kernels,
    unpad: bool = PatchOptions.unpad,
    share_prefixes: bool = PatchOptions.share_prefixes,
) -> Model:
    """Make this model instance keep the documents of a packed row separate, on any device. Return the same model.

    Document boundaries are read from each call: from TRL's keys (`cu_seq_lens_q` and others) or from `position_ids`
    that restart. Calls without boundaries and `generate()` run the unpatched code. Padded batches do too, unless
    `unpad` is set. Works before or after PEFT wrapping, on quantized models, with activation checkpointing and under
    `torch.compile`. Idempotent.

    The model is checked first ([`check`]) if its architecture has no patch, if its code differs from the code that the
    patch was measured with, or if its adapter or quantization has not been measured.

    Args:
        model (`torch.nn.Module`):
            A transformers causal LM, bare or wrapped.
        backend (`str`, *optional*, defaults to `"auto"`):
            Attention backend: `"auto"`, or a name that `trl-packfa env` lists.
        fused_kernels (`bool`, *optional*, defaults to `True`):
            In packed calls, compute LoRA layers together with their base layers; the result is PEFT's within rounding.
            On CUDA with liger-kernel installed, compute RMSNorms, rotary embeddings and SwiGLU by its kernels. `False`
            runs the model's and PEFT's own code; [`describe`] says what runs, and which LoRA layers cannot be fused.
        unpad (`bool`, *optional*, defaults to `False`):
            Compute padded batches, padded on the left or on the right, as one row of their real tokens. Callers see
            the shapes of the padded batch, with zeros at padding. Positions count from each row's first real token.
            Calls that get or ask for a cache run with padding. `patch` measures at once that outputs and gradients on
            this model are the same with and without padding.
        share_prefixes (`bool`, *optional*, defaults to `False`):
            With `unpad`, compute the shared prefix of rows, and of documents in a packed row, only once, if it has 16
            tokens or more (the prompt of a preference pair, or of a group of completions; a system prompt). `patch`
            measures at once that outputs and gradients are those of separate rows. Rows are computed separately if
            more than attention mixes tokens (recurrent state, documents run one by one), and while dropout or noise
            draws random numbers. [`describe`] and a warning say so.

    Raises:
        [`InvalidConfig`]: if `share_prefixes` comes without `unpad`.
        [`UnsupportedModel`]: if the architecture has no patch and no general patch is exact on it; if the adapter or
            the quantization cannot be packed; with `unpad`, if the backbone gets no attention mask.
        [`ContaminationError`]: if the architecture's code has changed and packing is not exact on it; if padded
            batches without padding, or rows with a shared prefix, are not exact.
        [`NoBackend`]: if the named backend does not exist.
    """
    tell_of_newer_versions()
    options = PatchOptions(backend, fused_kernels, unpad, share_prefixes)
    target = Target.of(model)
    verdicts = verdicts_on(target.model)  # before any change, so that a refused model stays as it was
    if is_patched_with(target.model, options, verdicts.kinds):
        return model
    with all_or_none([target.model]):
        state = apply_first_exact(target, options, verdicts.unmeasured)
        state.adapter_kinds = verdicts.kinds
    if state.unpadding is not None and state.unpadding.sharing is not None:
        state.unpadding.sharing.warn_of_refusal(target.model)
    return model


def unpatch(model: Model) -> Model:
    """Restore a patched model bit for bit and return the same model. Idempotent.

    A model from a [`PackedSFTTrainer`] keeps the changes that TRL made to it.
    """
    undo_patch(model)
    # A `PackedSFTTrainer` replaces the LM head before it patches the model, so the patch is undone first.
    undo_head(inner_model(model))
    return model


@contextmanager
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """Apply [`patch`] with these options for a `with` block. Afterwards the model is patched as it was before."""
    before = find_state(model)
    try:
        yield patch(model, **options)
    finally:
        if before is None:
            unpatch(model)
        else:
            restore_patch(model, before)
