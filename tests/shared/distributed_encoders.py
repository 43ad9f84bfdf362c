"""An embedding model trained with and without padding under torchrun, as `launches.py` starts it."""

import tiny
import torch
from datasets import Dataset
from launches import run_scenarios
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from training import logs_of, trained

import trl_packfa


def run(folder, *, model, free):
    torch.manual_seed(0)
    model = SentenceTransformer(model, device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    columns = {name: tiny.texts(column) for column, name in enumerate(("anchor", "positive"))}
    args = SentenceTransformerTrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=4, logging_steps=1, optim="sgd", use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", ddp_find_unused_parameters=True,
    )  # fmt: skip
    # Every rank sees the texts of both as negatives.
    loss = MultipleNegativesRankingLoss(model, gather_across_devices=True)
    trainer = SentenceTransformerTrainer(model, args=args, train_dataset=Dataset.from_dict(columns), loss=loss)
    if free:
        trl_packfa.padding_free(trainer)
    return [[entry[name] for name in ("loss", "grad_norm")] for entry in logs_of(trained(trainer))]


if __name__ == "__main__":
    run_scenarios(run)
