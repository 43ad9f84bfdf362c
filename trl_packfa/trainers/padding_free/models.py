"""Search for all models that a trainer holds: policy, reference, teacher, reward and value models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# The attribute of a trainer that holds the trained model.
POLICY = "model"
# Attributes that hold the policy again, wrapped.
_AGAIN = ("model_wrapped", "deepspeed", "accelerator")


def models_of(trainer: Any) -> dict[str, nn.Module]:
    """Find every transformers model that a trainer holds, bare or PEFT's, by the attribute that holds it, each once.

    A model in a list, such as GRPO's `reward_funcs`, has the name `name[i]`.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in _held(trainer):
        inner = next((m for m in module.modules() if isinstance(m, PreTrainedModel)), None)
        if inner is not None and id(inner) not in seen:
            seen.add(id(inner))
            found[name] = trainer.accelerator.unwrap_model(module, keep_torch_compile=True)
    return found


def _held(trainer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a trainer's attributes with their names, the policy first."""
    attributes = {POLICY: trainer.model, **vars(trainer)}
    for name, value in attributes.items():
        if name in _AGAIN:
            continue
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, nn.Module):
                    yield f"{name}[{i}]", item
