"""CPU stand-in for the LM head's Triton kernel: it takes the same arguments and overwrites the same memory.

`TRITON_INTERPRET=1 python tests/shared/pretended_head.py` compares the kernel itself with float64, by Triton's
interpreter, which cuts bfloat16 off instead of rounding it."""

import torch


def score_rows(logits, targets, scores, *, measures, slopes):
    assert logits.is_contiguous() and targets.is_contiguous() and scores.dtype == torch.float32
    assert targets.shape == logits.shape[:1] and scores.shape == (3, *targets.shape) and scores.stride(1) == 1
    found = exact_scores(logits.float(), targets)
    scores[0] = found[0]
    if measures:
        scores[1:] = torch.stack(found[1:3])
    if slopes:
        logits.data.copy_(found[3])


def exact_scores(logits, targets):
    """Return log-probabilities, entropies, top-1 flags `(n,)` and negated slopes `(n, V)`, in the logits' dtype."""
    log_probs = torch.log_softmax(logits, -1)
    slopes, of_target = log_probs.exp(), log_probs.gather(-1, targets[:, None])
    entropies = -(slopes * log_probs).sum(-1)
    slopes.scatter_(-1, targets[:, None], torch.expm1(of_target))
    return of_target[:, 0], entropies, (logits.max(-1).indices == targets).to(logits.dtype), slopes


def _compare(score, dtype, words, scale):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(4, words, generator=generator)).to(dtype)
    targets = torch.randint(8, words, (4,), generator=generator)
    logits[0, targets[0]] = logits.max() + 5  # likely
    logits[1, [3, targets[1]]] = logits[1].max() + 1  # as likely as an earlier word
    logits[2, [targets[2], -1]] = logits[2].max() + 1  # as likely as a later word
    exact, rows, scores = exact_scores(logits.double(), targets), logits.clone(), torch.full((3, 4), torch.nan)
    score(rows, targets, scores, measures=False, slopes=False)
    assert torch.equal(rows, logits) and scores[1:].isnan().all()
    score(rows, targets, scores, measures=True, slopes=True)
    assert scores[2].tolist() == exact[2].tolist() and exact[2].tolist()[:3] == [1, 0, targets[2] != words - 1]
    for found, wanted in zip(scores[:2], exact, strict=False):
        assert_float32(found, wanted)
    (assert_float32 if dtype == torch.float32 else assert_half)(rows, exact[3].to(dtype))


if __name__ == "__main__":
    from tolerance import assert_float32, assert_half

    from trl_packfa.kernels.lm_head import triton_kernel

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for words in (40, 8192, 20_001):  # one block, a full one, and several
            for scale in (1.0, 5.0):
                _compare(triton_kernel.score_rows, dtype, words, scale)
