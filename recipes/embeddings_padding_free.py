"""An embedding model without pad tokens, in its own trainer. python recipes/embeddings_padding_free.py

Losses, prompts, evaluators and checkpoints stay those of sentence-transformers. The same line works for its
CrossEncoderTrainer and for transformers' Trainer.
"""

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

import trl_packfa

model = SentenceTransformer("nomic-ai/modernbert-embed-base")
trainer = SentenceTransformerTrainer(
    model,
    args=SentenceTransformerTrainingArguments(
        "modernbert-embed-packed",
        num_train_epochs=1,
        per_device_train_batch_size=256,
        learning_rate=8e-5,
        warmup_steps=0.05,
        prompts={"question": "search_query: ", "answer": "search_document: "},
    ),
    train_dataset=load_dataset("sentence-transformers/gooaq", split="train"),
    loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=32),
)
trl_packfa.padding_free(trainer)
trainer.train()
print(trl_packfa.describe(trainer.model))
trainer.save_model()
