"""Encoders without padding in transformers' `Trainer` and in sentence-transformers: the padded run's losses."""

import os
from functools import partial

import pytest
import tiny
import torch
import transformers
from datasets import Dataset
from selection import exhaustive, in_full
from tiny import texts
from tiny_models.encoders import small_encoder
from tolerance import assert_regrouped, assert_trajectory
from transformers import Trainer, TrainingArguments
from trl_trainers import train

import trl_packfa
from trl_packfa.patching.state import find_state

# `ENCODER_STEPS=50` runs as many as the documentation tells of.
STEPS = int(os.environ.get("ENCODER_STEPS", "4"))
METRICS = ("eval_loss", "eval_a_", "eval_b_", "eval_c_")
TYPES = ["bert", "modernbert", *in_full("mpnet", "roberta")]
# SGD: Adam makes whole steps of gradients that are rounding alone, as those of key biases are.
COMMON = {
    "per_device_train_batch_size": 8, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True,
    "optim": "sgd", "learning_rate": 1e-2, "max_steps": STEPS,
}  # fmt: skip


def assert_same(*runs):
    assert_trajectory(*([(entry["loss"], entry["grad_norm"]) for entry in logs] for logs in runs))


def both(build):
    """Return the logs of a trainer with and without padding, and the second trainer."""
    logs = []
    for free in (False, True):
        torch.manual_seed(0)
        trainer = build()
        logs.append(train(trl_packfa.padding_free(trainer) if free else trainer))
    assert max(entry["padding_saved"] for entry in logs[1]) > 0.1
    return *logs, trainer


@pytest.fixture
def saved(tmp_path):
    """Save small encoders of a type with a tokenizer, as a user's folder, and return the folder."""
    pytest.importorskip("sentence_transformers")

    def save(model_type, head):
        folder = tmp_path / f"{model_type}-{head}"
        small_encoder(model_type, head, num_labels=1).save_pretrained(folder)
        tiny.save_tokenizer(folder)
        return str(folder)

    return save


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def sentence_transformer(folder, pooling="mean", *, width=32, **options):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(0)
    modules = [Transformer(folder), Pooling(width, pooling_mode=pooling, **options)]
    return without_dropout(SentenceTransformer(modules=modules, device="cpu"))


def embedding_trainer(model, out, columns=None, *, loss="ranking", settings=None, **options):
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    args = SentenceTransformerTrainingArguments(str(out / "out"), **COMMON, **(settings or {}))
    data = Dataset.from_dict(columns or {"anchor": texts(1), "positive": texts(2)})
    return SentenceTransformerTrainer(model, args=args, train_dataset=data, loss=losses()[loss](model), **options)


def losses():
    from sentence_transformers.sentence_transformer import losses as of

    return {
        "ranking": of.MultipleNegativesRankingLoss,
        "cached": lambda model: of.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
        "matryoshka": lambda model: of.MatryoshkaLoss(model, of.MultipleNegativesRankingLoss(model), [32, 16]),
        "cosine": of.CosineSimilarityLoss,
    }


@pytest.mark.parametrize("pooling", ["mean", *exhaustive("cls")])
@pytest.mark.parametrize("loss", ["ranking", "cached", *in_full("matryoshka"), *exhaustive("cosine")])
@pytest.mark.parametrize("model_type", TYPES)
def test_embeddings_train_as_padded(model_type, loss, pooling, saved, tmp_path):
    columns = {"anchor": texts(1), "positive": texts(2)}
    if loss == "cosine":
        columns["score"] = [i % 5 / 4 for i in range(64)]
    folder = saved(model_type, "MaskedLM")

    def build():
        return embedding_trainer(sentence_transformer(folder, pooling), tmp_path, columns, loss=loss)

    padded, free, trainer = both(build)
    assert_same(free, padded)
    assert find_state(trainer.model).unpadding.calls > 0


@pytest.mark.parametrize("model_type", ["bert", *in_full("modernbert", "mpnet")])
def test_cross_encoders_train_as_padded(model_type, saved, tmp_path):
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    folder = saved(model_type, "SequenceClassification")

    def build():
        torch.manual_seed(0)
        model = without_dropout(CrossEncoder(folder, num_labels=1, device="cpu"))
        args = CrossEncoderTrainingArguments(str(tmp_path / "out"), **COMMON)
        data = Dataset.from_dict({"query": texts(1), "answer": texts(2), "label": [float(i % 2) for i in range(64)]})
        return CrossEncoderTrainer(model, args=args, train_dataset=data, loss=BinaryCrossEntropyLoss(model))

    padded, free, _ = both(build)
    assert_same(free, padded)


@pytest.mark.parametrize("model_type", [*TYPES, "decoder"])
def test_encode_gives_the_same_embeddings(model_type, saved, tmp_path):
    """The decoder is a causal model under a pooling head, such as Qwen3's embedding models."""
    if model_type == "decoder":
        tiny.model(layers=2).save_pretrained(tmp_path)
        tiny.save_tokenizer(tmp_path)
        model = sentence_transformer(str(tmp_path), "lasttoken", width=64)
    else:
        model = sentence_transformer(saved(model_type, "MaskedLM"))
    expected = model.encode(texts(3), convert_to_tensor=True, batch_size=16)
    assert trl_packfa.patch(model, unpad=True) is model
    found = model.encode(texts(3), convert_to_tensor=True, batch_size=16)
    assert find_state(model).unpadding.calls == 4
    assert_regrouped(found, expected)
    trl_packfa.unpatch(model)
    assert torch.equal(model.encode(texts(3), convert_to_tensor=True, batch_size=16), expected)


def evaluators():
    from sentence_transformers.sentence_transformer import evaluation

    first, second = texts(1, 24), texts(2, 24)
    return {
        "similarity": evaluation.EmbeddingSimilarityEvaluator(first, second, [i % 5 / 4 for i in range(24)], name="a"),
        "retrieval": evaluation.InformationRetrievalEvaluator(
            {str(i): text for i, text in enumerate(first)}, {str(i): text for i, text in enumerate(second)},
            {str(i): {str(i), str((i + 1) % 24)} for i in range(24)}, name="b",
        ),
        "pairs": evaluation.BinaryClassificationEvaluator(first, second, [i % 2 for i in range(24)], name="c"),
    }  # fmt: skip


@pytest.mark.parametrize("model_type", ["modernbert", *in_full("bert", "mpnet")])
def test_prompts_and_evaluators_give_the_padded_numbers(model_type, saved, tmp_path):
    """Prompts are part of the texts, and pooling may leave them out."""
    folder, numbers = saved(model_type, "MaskedLM"), []
    for free in (False, True):
        trainer = embedding_trainer(
            sentence_transformer(folder, include_prompt=False), tmp_path, evaluator=list(evaluators().values()),
            settings={"prompts": {"anchor": "w1 w2 ", "positive": "w3 w4 w5 "}},
            eval_dataset=Dataset.from_dict({"anchor": texts(1), "positive": texts(2)}),
        )  # fmt: skip
        train(trl_packfa.padding_free(trainer) if free else trainer)
        numbers.append({name: value for name, value in trainer.evaluate().items() if name.startswith(METRICS)})
    padded, found = numbers
    assert len(padded) > 20 and padded.keys() == found.keys()
    assert_trajectory([[found[name] for name in padded]], [list(padded.values())])


def test_embedding_gemma_trains_as_padded(tmp_path):
    """A decoder's stack whose tokens see each other in both directions, some through windows on both sides."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}  # fmt: skip
    config = Gemma3TextConfig(
        vocab_size=tiny.VOCAB, **sizes, sliding_window=8, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tiny.save(tmp_path, Gemma3TextModel(config))
    padded, free, trainer = both(lambda: embedding_trainer(sentence_transformer(folder), tmp_path))
    assert_same(free, padded)
    assert find_state(trainer.model).patch.level == "stack"


def token_ids():
    return [dict(tiny.tokenizer()(text)) for text in texts(0, 32)]


def classifier(args, model_type="bert"):
    rows = [{**tiny.tokenizer()(text), "labels": i % 2} for i, text in enumerate(texts(0))]
    model = small_encoder(model_type, "SequenceClassification")
    collator = transformers.DataCollatorWithPadding(tiny.tokenizer())
    return Trainer(model, args, train_dataset=Dataset.from_list(rows), data_collator=collator)


def masked_lm(args):
    tokenizer = tiny.tokenizer(["<mask>"])
    tokenizer.mask_token = "<mask>"
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=1)
    model = small_encoder("modernbert", "MaskedLM")
    return Trainer(model, args, train_dataset=Dataset.from_list(token_ids()), data_collator=collator)


def multiple_choice(args):
    ids = [row["input_ids"] for row in token_ids()]
    choices = [[ids[(i + k) % 32] for k in (0, 3, 5)] for i in range(32)]
    rows = [{"input_ids": of, "attention_mask": [[1] * len(one) for one in of], "labels": i % 3}
            for i, of in enumerate(choices)]  # fmt: skip
    collator = transformers.DataCollatorForMultipleChoice(tiny.tokenizer())
    model = small_encoder("bert", "MultipleChoice")
    return Trainer(model, args, train_dataset=Dataset.from_list(rows), data_collator=collator)


CLASSIFIERS = [partial(classifier, model_type=model_type) for model_type in ("modernbert", "mpnet", "roberta")]


@pytest.mark.parametrize("task", [classifier, masked_lm, multiple_choice, *in_full(*CLASSIFIERS)])
def test_a_task_trains_as_padded(task, tmp_path):
    padded, free, trainer = both(lambda: task(TrainingArguments(str(tmp_path), **COMMON)))
    assert_same(free, padded)
    first = trainer.trl_packfa_padding_free.first_calls["model"]
    assert first.difference <= first.allowed


def test_sparse_embeddings_train_as_padded_and_are_saved(saved, tmp_path):
    """Sparse embeddings (SPLADE) pool the logits of a masked LM."""
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    folder, out = saved("bert", "MaskedLM"), tmp_path / "out"

    def build():
        torch.manual_seed(0)
        model = without_dropout(SparseEncoder(folder, device="cpu"))
        args = SparseEncoderTrainingArguments(str(out), **{**COMMON, "save_strategy": "steps", "save_steps": 2})
        loss = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), 1e-3, query_regularizer_weight=1e-3)
        data = Dataset.from_dict({"anchor": texts(1), "positive": texts(2)})
        return SparseEncoderTrainer(model, args=args, train_dataset=data, loss=loss)

    padded, free, trainer = both(build)
    assert_same(free, padded)
    loaded = SparseEncoder(str(out / f"checkpoint-{STEPS}"), device="cpu")
    expected, found = (model.encode(texts(3)).to_dense() for model in (trainer.model, loaded))
    assert_regrouped(found, expected)
