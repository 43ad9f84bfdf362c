"""Threads that share a process, or a model, see their own documents only."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from tolerance import assert_recomputed

from trl_packfa import patch


def run_in_threads(jobs):
    """Each job's results, run at the same time; errors are raised here."""
    start = threading.Barrier(len(jobs))

    def work(job):
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(work, jobs))


BATCHES = ((5, 1, 8, 3), (2, 11, 4), (7, 7), (1, 1, 1, 14))


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("models", [1, 2])
@torch.no_grad()
def test_threads_do_not_see_each_others_documents(name, models):
    instances = [patch(tiny.MODELS[name]()) for _ in range(models)]
    docs = [tiny.documents(lengths, seed=i) for i, lengths in enumerate(BATCHES)]
    expected = [instances[i % models](**tiny.batch(d)).logits for i, d in enumerate(docs)]

    @torch.no_grad()
    def job(i):
        return [instances[i % models](**tiny.batch(docs[i])).logits for _ in range(8)]

    found = run_in_threads([lambda i=i: job(i) for i in range(len(docs))])
    for logits, right in zip(found, expected, strict=True):
        assert all(torch.equal(each, right) for each in logits)


@pytest.mark.parametrize("name", ["qwen2", "mamba", "gpt2"])
def test_threads_with_checkpointing_do_not_switch_it_off_for_each_other(name):
    model = patch(tiny.MODELS[name]()).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    docs = [tiny.documents(lengths, seed=i) for i, lengths in enumerate(BATCHES)]

    def gradient(i):
        embedded = model.get_input_embeddings()(torch.cat(docs[i]))[None].detach().requires_grad_()
        batch = tiny.batch(docs[i])
        del batch["input_ids"]
        logits = model(inputs_embeds=embedded * 1, **batch).logits
        (found,) = torch.autograd.grad((logits * torch.linspace(-1, 1, logits.shape[-1])).sum(), embedded)
        return found

    expected = [gradient(i) for i in range(len(docs))]
    found = run_in_threads([lambda i=i: [gradient(i) for _ in range(6)] for i in range(len(docs))])
    for gradients, right in zip(found, expected, strict=True):
        for each in gradients:
            assert_recomputed(each, right)
    assert all(getattr(m, "gradient_checkpointing", True) for m in model.modules())
