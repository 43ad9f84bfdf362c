"""Train every causal-LM type for two steps with `PackedSFTTrainer`, beside TRL's `SFTTrainer` on padded batches.

`python tools/training_matrix.py` trains each type that `patches/models.json` calls exact in full and with the default
adapter, and writes `patches/training.json`. The documentation's sentence on it is made from this file.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import torch
import transformers
from datasets import Dataset
from support_matrix import rounded, run_types
from tiny_models import small_model
from tiny_models.sizes import VOCABULARY
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.errors import PackingError, first_line
from trl_packfa.kernels.lm_head.chunked import Head
from trl_packfa.patches.measured import TRAINING, results
from trl_packfa.patching.inspect import inner_model
from trl_packfa.trainers.loading import default_adapter

# What trains: all weights, or the adapter that the trainer adds by itself.
WAYS: dict[str, dict[str, Any]] = {"full": {"use_peft": False}, "lora": {"lora_dropout": 0.0}}
STEPS = 2
# What TRL's trainer is told where its loss is not the model's: its fused head leaves something out.
_LOGITS = "on the model's own logits"
# Limits of a relative difference in float32, of a logged loss and of a gradient's norm.
_LOSS, _NORM = 1e-4, 1e-3
_LOGGED = ("loss", "grad_norm")
_LENGTHS = (13, 2, 29, 7, 21, 5, 17, 3)

Logs = list[dict[str, float]]


def trained_types() -> tuple[str, ...]:
    """Return the types that packing is exact on."""
    return tuple(name for name, result in results().items() if result["verdict"] == "exact")


def measure_type(name: str) -> dict[str, Any]:
    """Train one type in every way; return its entry for `training.json`, also if it fails."""
    return {way: measure_way(name, way) for way in WAYS}


def measure_way(name: str, way: str) -> dict[str, Any]:
    """Train a type in one way, stock and packed, and compare the logs.

    Runs that differ are trained again in float64: rounding is smaller there, a fault is not.
    """
    found = _compared(name, way)
    return found if found["verdict"] != "differs" else {**found, "float64": _compared(name, way, torch.float64)}


def _compared(name: str, way: str, weights: torch.dtype | None = None) -> dict[str, Any]:
    with _silent(), tempfile.TemporaryDirectory() as folder:
        try:
            expected, _ = train(SFTTrainer, name, way, folder, weights=weights)
        except Exception as error:  # whatever the model's code raises
            return {"verdict": "not trained by TRL", "why": first_line(error)[:160], **_packed(name, way, folder)}
        try:
            logs, trainer = train(PackedSFTTrainer, name, way, folder, weights=weights)
        except PackingError as error:
            return {"verdict": "refused", "why": first_line(error)}
        except Exception as error:  # record it as a result, so that the other types go on
            return {"verdict": "raises", "why": first_line(error)[:160]}
        found = differences(logs, expected)
        own = trainer._head.scores_own_logits
        beside = ()
        if not _same(found) and own:
            beside = (_LOGITS,)
            expected, _ = train(SFTTrainer, name, way, folder, beside=beside, weights=weights)
            found = differences(logs, expected)
    report = trainer.check_report
    return {
        "verdict": "padded" if not trainer.args.packing else "same" if _same(found) else "differs",
        "beside": ["TRL", *beside],
        **rounded(found),
        # The check of the LM head on the first batch, which some types skip.
        "head": float(f"{report['head'].difference:.1e}") if report is not None and "head" in report else None,
        "mfu": all("mfu" in entry for entry in logs),
    }


def _packed(name: str, way: str, folder: str) -> dict[str, str]:
    """Tell what the packed trainer does with a type that TRL's cannot train."""
    try:
        logs, _ = train(PackedSFTTrainer, name, way, folder)
    except Exception as error:  # whatever the model's code raises
        return {"packed": first_line(error)[:160]}
    return {"packed": "trains" if all(math.isfinite(entry["loss"]) for entry in logs) else "not finite"}


def _same(found: dict[str, float]) -> bool:
    return found["loss"] <= _LOSS and found["grad_norm"] <= _NORM


def train(
    cls: type[SFTTrainer],
    name: str,
    way: str,
    folder: str,
    *,
    beside: Sequence[str] = (),
    weights: torch.dtype | None = None,
    **options: Any,
) -> tuple[Logs, Any]:
    """Train a type with this trainer; return the logs of the steps, and the trainer.

    `beside` changes TRL's loss; `weights` is the dtype of the weights, if it is not the type's own; `options` are
    arguments of the trainer.
    """
    packs = issubclass(cls, PackedSFTTrainer)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "logging_steps": 1,
        "max_steps": STEPS, "save_strategy": "no", "gradient_checkpointing": False, "use_cpu": True, "bf16": False,
        "report_to": "none", "disable_tqdm": True, **options,
    }  # fmt: skip
    ours = PackedSFTConfig(folder, **{**settings, **WAYS[way]})
    args: Any = ours if packs else SFTConfig(folder, **settings)
    torch.manual_seed(0)
    built: Any = small_model(name)
    model = built.to(weights) if weights else built
    # TRL's trainer gets the adapter that ours adds by itself.
    adapter = {} if packs or way == "full" else {"peft_config": default_adapter(model.config.model_type, ours, model)}
    torch.manual_seed(0)
    trainer = cls(model, args, train_dataset=documents(model), processing_class=_tokenizer(), **adapter)
    if _LOGITS in beside:
        outer: Any = trainer.model
        inner: Any = inner_model(outer)
        inner.forward = Head(inner, inner.forward)
    torch.manual_seed(0)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], trainer


def documents(model: Any) -> Dataset:
    """Make documents of random tokens of very uneven lengths; of every second one the first third has no labels."""
    words = min(VOCABULARY, model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(4, words, (length,), generator=generator).tolist() for length in _LENGTHS * STEPS]
    untrained = [len(ids) // 3 * (number % 2) for number, ids in enumerate(drawn)]
    return Dataset.from_list(
        [{"input_ids": ids, "labels": [*[-100] * n, *ids[n:]]} for n, ids in zip(untrained, drawn, strict=True)]
    )


def differences(logs: Logs, expected: Logs) -> dict[str, float]:
    """Return the worst relative difference of the losses and of the gradients' norms; infinite for what is NaN."""
    worst: dict[str, float] = dict.fromkeys(_LOGGED, 0.0)
    for entry, other in zip(logs, expected, strict=True):
        for name in _LOGGED:
            found = abs(entry[name] - other[name]) / max(abs(other[name]), 1e-6)
            worst[name] = max(worst[name], found if math.isfinite(found) else math.inf)
    return worst


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


@contextmanager
def _silent() -> Iterator[None]:
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Train every type and write the results."""
    what = "train every causal-LM type for two steps, in full and with an adapter, beside TRL's trainer"
    run_types(what, TRAINING, trained_types(), measure_type)


if __name__ == "__main__":
    main()
