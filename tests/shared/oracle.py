"""Reference implementation without an import of trl_packfa: float64, one document at a time. Shape letters: T packed
tokens, N heads, K key/value heads, H head dim."""

import copy

import torch


def attention(query, key, value, lengths, *, scaling, sliding_window=None, softcap=None, sinks=None):
    """Compute causal attention inside each document in float64 with loops over queries: `(T, N, H)`."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    outputs, start = [], 0
    for length in lengths:
        for q in range(start, start + length):
            first = start if sliding_window is None else max(start, q - sliding_window + 1)
            keys = key[first : q + 1].repeat_interleave(group, dim=1)
            values = value[first : q + 1].repeat_interleave(group, dim=1)
            scores = torch.einsum("nh,knh->nk", query[q], keys) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : q + 1 - first]
            outputs.append(torch.einsum("nk,knh->nh", weights, values))
        start += length
    return torch.stack(outputs)


def attention_of_documents(query, key, value, lengths, *, scaling, sliding_window=None, softcap=None, sinks=None):
    """Compute causal attention in float64 with one matrix per document, for documents of thousands of tokens."""
    outputs = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
        places = torch.arange(len(q), device=q.device)
        distance = places[:, None] - places[None]
        seen = (distance >= 0) & (distance < (sliding_window or len(q)))
        outputs.append(masked_attention(q, k, v, seen, scaling=scaling, softcap=softcap, sinks=sinks))
    return torch.cat(outputs)


def masked_attention(query, key, value, mask, *, scaling, softcap=None, sinks=None):
    """Compute attention in float64 with one matrix; `mask` `(T, T)` tells which keys a query sees."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qnh,knh->nqk", query, key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=2)
    return torch.einsum("nqk,knh->qnh", torch.softmax(scores, dim=2)[..., : len(key)], value)


def nll(logits, ids):
    """Return the summed negative log-likelihood of one document, without its first token."""
    return torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


def alone(model, documents, *, dtype=torch.float64):
    """Return the logits of each document and the gradients of the summed loss, from plain forwards of a model copy."""
    model = copy.deepcopy(model).to(dtype)
    model.zero_grad()
    logits = []
    for ids in documents:
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        if len(ids) > 1:
            loss = torch.nn.functional.cross_entropy(logits[-1][:-1], ids[1:], reduction="sum")
            loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [x.detach() for x in logits], grads
