"""Train small models two steps in transformers' `Trainer` and in sentence-transformers', with and without padding.

A run's loss is the one that the model itself computes from labels. That of embeddings is sentence-transformers'.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from support_matrix import rounded
from tiny_models.composites import padded
from tiny_models.encoders import EMBEDDINGS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import trl_packfa

# SGD: Adam makes whole steps of gradients that are rounding alone, as those of key biases are.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
    "use_cpu": True, "optim": "sgd", "learning_rate": 1e-2, "disable_tqdm": True, "remove_unused_columns": False,
    "seed": 0,
}  # fmt: skip
# Of the rows, two of them so much longer than the others that they are a group of their own.
_LENGTHS = (9, 3, 34, 2, 5, 41, 2, 7)
_CHOICES = 3
# Names of the two logged values that are compared.
COMPARED = ("loss", "grad_norm")
# Limit of their difference after two steps in float32. BERT's losses are 6e-4 apart if its rows see each other.
LIMIT = 1e-5

Logs = Sequence[Mapping[str, float]]


def compare(model: Any, build: Callable[[Any, str], Trainer], **options: Any) -> dict[str, float]:
    """Train copies of a model with and without padding; return the largest difference of each compared value.

    `build` makes the trainer of a model and a folder. A value above one is compared relatively. `saved` is the share
    of the places that were not computed, 0 if every call ran with its pads. `options` are those of `padding_free`.
    """
    with tempfile.TemporaryDirectory() as folder:
        padded_run = _logs(build(copy.deepcopy(model), folder))
        free = _logs(trl_packfa.padding_free(build(copy.deepcopy(model), folder), **options))
    found = {
        name: max(abs(a[name] - b[name]) / max(1.0, abs(a[name])) for a, b in zip(padded_run, free, strict=True))
        for name in COMPARED
    }
    return {**found, "saved": max(entry.get("padding_saved", 0.0) for entry in free)}


def off_by(run: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Return the rounded result of a comparison, or what it raised: the other types go on."""
    try:
        return rounded(run())
    except Exception as error:  # whatever the model's code, the trainer or the patch raises
        said = re.sub(r"'/[^']*'", "a folder", (str(error).strip() or "-").splitlines()[0])
        return {"raises": f"{type(error).__name__}: {said[:120]}"}


def twice_if_rounded(train: Callable[[torch.dtype], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of training in float32, and if the runs differ there, of training in float64, too.

    Rounding is smaller in float64, a fault is not.
    """
    found = train(torch.float32)
    return found if "raises" in found or trains_as_padded(found) else {**found, "float64": train(torch.float64)}


def trains_as_padded(found: Mapping[str, Any]) -> bool:
    """Tell whether a comparison ran and found the same losses and gradient norms, up to rounding: in float64 too."""
    if "raises" in found:
        return False
    return all(found[name] <= LIMIT for name in COMPARED) or trains_as_padded(found.get("float64", {"raises": "-"}))


def _logs(trainer: Trainer) -> Logs:
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    torch.manual_seed(0)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def compare_head(model: Any, head: str, **options: Any) -> dict[str, float]:
    """Train an encoder with a head, or, without one, as an embedding model; see [`compare`]."""
    disable_progress_bars()
    if head == EMBEDDINGS:
        return _compare_embeddings(model, **options)
    rows = Dataset.from_list([_row(head, i) for i in range(len(_LENGTHS))])

    def build(own: Any, folder: str) -> Trainer:
        return Trainer(own, TrainingArguments(folder, **SETTINGS), train_dataset=rows, data_collator=_collate)

    return compare(model, build, **options)


def _ids(number: int) -> list[int]:
    """Return the ids of a text; T5 reads a row at its end-of-sequence token."""
    generator = torch.Generator().manual_seed(number)
    return [*torch.randint(3, 97, (_LENGTHS[number % len(_LENGTHS)] - 1,), generator=generator).tolist(), 2]


def _row(head: str, number: int) -> dict[str, Any]:
    """Return an example for a head: ids, and labels in the form that the head takes."""
    ids = _ids(number)
    if head == "SequenceClassification":
        return {"input_ids": ids, "labels": number % 2}
    if head == "MultipleChoice":
        return {"input_ids": [_ids(number + k) for k in range(_CHOICES)], "labels": number % _CHOICES}
    if head == "QuestionAnswering":
        return {"input_ids": ids, "start_positions": number % len(ids), "end_positions": len(ids) - 1}
    if head == "TokenClassification":
        return {"input_ids": ids, "labels": [token % 2 for token in ids]}
    return {"input_ids": ids, "labels": [token if i % 3 == 0 else -100 for i, token in enumerate(ids)]}


def _collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad the rows on the right, labels of tokens with -100."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    ids = columns.pop("input_ids")
    by_choice = isinstance(ids[0][0], list)
    texts, mask = padded([text for row in ids for text in row] if by_choice else ids, left=False)
    shape = (len(rows), _CHOICES, -1) if by_choice else (len(rows), -1)
    batch = {"input_ids": texts.view(shape), "attention_mask": mask.view(shape)}
    for name, values in columns.items():
        if isinstance(values[0], list):
            labels, of_tokens = padded(values, left=False)
            labels = torch.nn.functional.pad(labels, (0, texts.shape[1] - labels.shape[1]))
            batch[name] = labels.masked_fill(mask == 0, -100)
            assert of_tokens.sum() == mask.sum()
        else:
            batch[name] = torch.tensor(values)
    return batch


def _compare_embeddings(model: Any, **options: Any) -> dict[str, float]:
    """Train a model without a head in sentence-transformers' trainer: mean pooling, in-batch negatives."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling

    texts = [" ".join(map(str, _ids(i)[:-1])) for i in range(2 * len(_LENGTHS))]
    data = Dataset.from_dict({"anchor": texts[::2], "positive": texts[1::2]})
    settings = {name: value for name, value in SETTINGS.items() if name != "remove_unused_columns"}
    width = _width(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)

        def build(own: Any, out: str) -> Trainer:
            transformer = Transformer(folder)
            transformer.model = own
            embedder = SentenceTransformer(modules=[transformer, Pooling(width, pooling_mode="mean")], device="cpu")
            args = SentenceTransformerTrainingArguments(out, **settings)
            loss = MultipleNegativesRankingLoss(embedder)
            return SentenceTransformerTrainer(embedder, args=args, train_dataset=data, loss=loss)

        return compare(model, build, **options)


def _width(model: Any) -> int:
    with torch.no_grad():
        return model(input_ids=torch.tensor([_ids(0)]), attention_mask=torch.ones(1, _LENGTHS[0]).long())[0].shape[-1]


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{str(i): i for i in range(3, 97)}}
    core = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="</s>", model_max_length=64
    )


def compare_images(model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Train a model with images or sounds on copies of one batch of padded rows, its own loss."""
    disable_progress_bars()
    places = Dataset.from_dict({"place": list(range(2 * SETTINGS["per_device_train_batch_size"]))})

    def build(own: Any, folder: str) -> Trainer:
        collate = lambda rows: {name: value.clone() for name, value in batch.items()}  # noqa: E731
        return Trainer(own, TrainingArguments(folder, **SETTINGS), train_dataset=places, data_collator=collate)

    return compare(model, build)
