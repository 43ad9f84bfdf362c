"""LLaMA-Factory v1 plugin: a batching strategy and a kernel, both named `packfa`.

```yaml
flash_attn: sdpa                   # packed rows use it nowhere: the kernel patches the model
kernel_config: {name: packfa}
batching_strategy: packfa
```

`python -m trl_packfa.frameworks.llama_factory_plugin config.yaml` trains with both, `torchrun -m ...` on several
devices. This command is needed because v1 has no config field that imports a plugin. An optimizer step has the same
examples as with `batching_strategy: normal`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import VersionTooOld
from .packing import packed_row, patch_checked


def examples_of_a_step(batch_info: dict[str, Any]) -> int:
    """Return the number of examples in an optimizer step on one rank."""
    return batch_info["micro_batch_size"] * batch_info["num_micro_batch"]


def compute_length(data_provider: Any, batch_info: dict[str, Any]) -> int:
    """Return the number of optimizer steps in an epoch; each batch of the provider is one step."""
    return len(data_provider)


def fill_buffer(buffer: Any, batch_info: dict[str, Any], next_samples: Callable[[bool], list[Any] | None]) -> None:
    """Fetch samples until the buffer holds the examples of one optimizer step."""
    while len(buffer) < examples_of_a_step(batch_info):
        samples = next_samples(False)
        if samples is None:
            return
        buffer.put(samples)


def generate_batch(buffer: Any, batch_info: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the micro-batches of an optimizer step, each as one packed row; `None` if too few examples are left."""
    count, size = examples_of_a_step(batch_info), batch_info["micro_batch_size"]
    if len(buffer) < count:
        return None
    samples = buffer.get(count)
    return [_row(samples[i : i + size], batch_info["cutoff_len"]) for i in range(0, count, size)]


def _row(samples: list[dict[str, Any]], cutoff: int) -> dict[str, Any]:
    cut = [
        {name: list(sample[name])[:cutoff] for name in ("input_ids", "labels", "loss_weights") if name in sample}
        for sample in samples
    ]
    row = packed_row([sample for sample in cut if sample["input_ids"]])
    if all("loss_weights" in sample for sample in cut):
        # The first weight is 0, as the first label is masked: nothing predicts a document's first token.
        weights = [weight for sample in cut if sample["input_ids"] for weight in (0.0, *sample["loss_weights"][1:])]
        row["loss_weights"] = torch.tensor([weights])
    return row


def apply(model: Any, include_kernels: Any = None) -> Any:
    """Patch the loaded model, check that packing is exact ([`patch_checked`]), and return the same model."""
    patch_checked(model)
    return model


def register() -> None:
    """Register the batching strategy and the kernel; raise [`VersionTooOld`] if LLaMA-Factory has no v1 or another."""
    try:
        from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin  # type: ignore[import-not-found]
        from llamafactory.v1.plugins.trainer_plugins.batching import BatchingPlugin  # type: ignore[import-not-found]
    except ImportError as error:
        raise VersionTooOld(
            "trl_packfa.frameworks.llama_factory_plugin needs LLaMA-Factory 0.9.5 or newer, with its v1.",
            why=[str(error)],
            do="pip install 'llamafactory>=0.9.5'",
        ) from error
    strategy = BatchingPlugin("packfa")
    strategy.register("get_data_provider_batch_size")(examples_of_a_step)
    strategy.register("compute_length")(compute_length)
    strategy.register("fill_buffer")(fill_buffer)
    strategy.register("generate_batch")(generate_batch)
    KernelPlugin("packfa").register()(apply)


def main() -> None:
    """Register strategy and kernel, then train with the config."""
    register()
    from llamafactory.v1.trainers.sft_trainer import run_sft  # type: ignore[import-not-found]  # no dependency

    run_sft()


if __name__ == "__main__":
    main()
