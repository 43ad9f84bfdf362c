"""Preference trainers, and a trainer of embeddings, under torchrun, as `launches.py` starts them."""

import os
from pathlib import Path

import tiny
import torch
from datasets import Dataset
from distributed_run import forget_the_last_engine
from launches import run_scenarios
from training import logs_of, trained
from trl_trainers import build, build_packed, train

import trl_packfa


def run(folder, *, kind, packed, **options):
    """Train, with the libraries' own trainer or without pads, and return the logs. Each step holds the same examples
    under any number of processes."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        forget_the_last_engine()
    torch.manual_seed(0)
    if kind == "embeddings":
        return embeddings(folder, packed, **options)
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8 // world}
    batch |= {"ddp_backend": "gloo" if world > 1 else None, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    return train((build_packed if packed else build)(kind, Path(folder), **{**batch, **options}))


def embeddings(folder, free, *, model):
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(model, device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    columns = {name: tiny.texts(column) for column, name in enumerate(("anchor", "positive"))}
    args = Arguments(
        folder, per_device_train_batch_size=8, max_steps=4, logging_steps=1, optim="sgd", use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", ddp_find_unused_parameters=True, ddp_backend="gloo",
    )  # fmt: skip
    # Every rank sees the texts of both as negatives.
    loss = MultipleNegativesRankingLoss(model, gather_across_devices=True)
    trainer = SentenceTransformerTrainer(model, args=args, train_dataset=Dataset.from_dict(columns), loss=loss)
    return [
        {name: entry[name] for name in ("loss", "grad_norm")}
        for entry in logs_of(trained(trl_packfa.padding_free(trainer) if free else trainer))
    ]


if __name__ == "__main__":
    run_scenarios(run)
