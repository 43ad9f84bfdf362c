"""Whether TRL's fused LM head computes this model's own loss.

TRL multiplies the backbone's output with `lm_head.weight` and knows the scalings of some architectures. A model that
does something else in between (ModernBERT's prediction head, say) would train on wrong log-probabilities, packed or
not.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import UnsupportedModel
from .exactness import quiet

_TOKENS = 16
# Largest difference of a log-probability that rounding explains; wrong heads are off by whole units.
_ALLOWED, _ALLOWED_HALF = 1e-3, 0.25


def require_own_loss(model: Any, *, seed: int) -> None:
    """Compare the fused head's log-probabilities with those of the model's logits, on a few random tokens.

    Args:
        model (`torch.nn.Module`):
            A causal LM with TRL's fused LM head, bare or wrapped.
        seed (`int`):
            Seed of the tokens.

    Raises:
        [`UnsupportedModel`]: if they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = model.get_input_embeddings().weight
    ids = torch.randint(1, embeddings.shape[0], (1, _TOKENS), generator=generator).to(embeddings.device)
    with quiet(model), torch.no_grad():
        fused = model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False).log_probs
        logits = model(input_ids=ids, use_cache=False).logits
    own = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    difference = float((fused.float() - own).abs().max())
    allowed = _ALLOWED if logits.dtype in (torch.float32, torch.float64) else _ALLOWED_HALF
    if not difference <= allowed:
        raise UnsupportedModel(
            f"TRL's fused LM head does not compute the loss of {type(model).__name__}: log-probabilities are off by "
            f"{difference:.3f}.",
            why=["it skips what this architecture does between backbone and LM head; padded SFTTrainer does the same"],
            do="Use trl_packfa.patch(model) with transformers.Trainer, whose loss is the model's own.",
        )
