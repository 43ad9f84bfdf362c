"""Random valid and contradictory batches, and the meaning that each must have, without an import of trl_packfa. Shape
letters: B rows, L row length."""

import itertools
import random

import torch

REFUSED, UNPACKED = "refused", "unpacked"
SOURCES = (
    "packed_layout", "flash", "flash without positions", "positions", "positions", "nothing", "seq_idx", "k only",
)  # fmt: skip
INTEGERS = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int16, torch.uint8)


def lengths_of_row(rng, total=None):
    """Draw the document lengths of a row of `total` tokens: a few, one huge, or very many tiny documents."""
    if total is None:
        kind = rng.random()
        if kind < 0.02:
            return [rng.randint(1, 2) for _ in range(rng.randint(30, 60))]
        if kind < 0.04:
            return [rng.randint(90, 120), *(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))]
        return [rng.choice((1, 1, 2, rng.randint(1, 12))) for _ in range(rng.randint(1, 6))]
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(rng.randint(1, 8), total - sum(lengths)))
    return lengths


def positions_of(rng, lengths, style):
    """Return the positions of one row's documents in the given style."""
    rows = []
    for length in lengths:
        start = {"offset": 2, "left-truncated": rng.randint(0, 4)}.get(style, 0)
        rows.append(list(range(start, start + length)))
    flat = list(itertools.chain.from_iterable(rows))
    at = rng.randrange(len(flat))
    if style == "jump":
        flat[at:] = [p + 3 for p in flat[at:]]
    elif style == "decrease":
        flat[at] = max(flat[at] - rng.randint(1, 3), 0)
    elif style == "repeat":
        flat[at] = flat[at - 1]
    elif style == "negative":
        flat = [p - 1 for p in flat]
    elif style == "running":
        flat = list(range(len(flat)))
    elif style == "random":
        flat = [rng.randint(0, 4) for _ in flat]
    return flat


STYLES = ("natural",) * 16 + (
    "offset", "left-truncated", "jump", "decrease", "repeat", "negative", "running", "random",
)  # fmt: skip


def mask_of(rng, rows, length):
    """Draw a mask: mostly none, else all ones, trailing zeros, leading zeros, holes, or another shape."""
    kind = rng.choice(("none",) * 12 + ("ones", "ones", "trailing", "leading", "holes", "short"))
    if kind == "none":
        return None
    mask = torch.ones(rows, length, dtype=rng.choice((torch.int64, torch.bool, torch.float32)))
    if kind == "short":
        return mask[:, :-1] if length > 1 else None
    for row in mask:
        cut = rng.randint(0, length - 1)
        if kind == "trailing":
            row[length - cut :] = 0
        elif kind == "leading":
            row[:cut] = 0
        elif kind == "holes":
            row[[rng.randrange(length) for _ in range(2)]] = 0
    return mask


def disturb(rng, call):
    """Put one contradiction, or none, into the keys of FlashAttention."""
    kinds = ("shift", "total", "backwards", "k", "maximum", "dtype", "seq_idx", "tail", "list")
    kind = rng.choice(("none",) * 20 + kinds)
    offsets = call["cu_seq_lens_q"].clone()
    inner = rng.randrange(len(offsets))
    if kind == "shift" and 0 < inner < len(offsets) - 1:
        offsets[inner] += rng.choice((-1, 1))
        call["cu_seq_lens_q"] = call["cu_seq_lens_k"] = offsets
    elif kind == "total":
        call["cu_seq_lens_q"] = call["cu_seq_lens_k"] = torch.cat([offsets[:-1], offsets[-1:] + rng.choice((-1, 1))])
    elif kind == "backwards":
        call["cu_seq_lens_q"] = call["cu_seq_lens_k"] = offsets.flip(0)
    elif kind == "k":
        offsets[inner] += 1
        call["cu_seq_lens_k"] = offsets
    elif kind == "maximum":
        call["max_length_q"] -= 1
    elif kind == "dtype":
        dtype = rng.choice((torch.int64, torch.float32, torch.int16))
        call["cu_seq_lens_q"] = call["cu_seq_lens_k"] = offsets.to(dtype)
    elif kind == "seq_idx":
        call["seq_idx"] = call["seq_idx"].clone()
        call["seq_idx"].view(-1)[rng.randrange(call["seq_idx"].numel()) :] += 1
    elif kind == "tail":  # repeated offsets pad to a fixed size
        call["cu_seq_lens_q"] = call["cu_seq_lens_k"] = torch.cat([offsets, offsets[-1:], offsets[-1:]])
    elif kind == "list":
        call["cu_seq_lens_q"] = offsets.tolist()


def batch(rng, vocabulary):
    """Draw the arguments of one call; `lengths` stands for a packed layout, which the test builds."""
    first = lengths_of_row(rng)
    rows = [first, *(lengths_of_row(rng, sum(first)) for _ in range(rng.choice((0, 0, 0, 1, 2))))]
    length = sum(first)
    lengths = list(itertools.chain.from_iterable(rows))
    tokens = rng.choice((vocabulary, 4)) if length < 40 else 4
    call = {"input_ids": torch.tensor([[rng.randrange(1, tokens) for _ in range(length)] for _ in rows])}
    source, style = rng.choice(SOURCES), rng.choice(STYLES)
    ends = list(itertools.accumulate(lengths))
    numbers = [i for i, n in enumerate(lengths) for _ in range(n)]
    flash = {
        "cu_seq_lens_q": torch.tensor([0, *ends], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, *ends], dtype=torch.int32),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.tensor(numbers, dtype=torch.int32).view(len(rows), length),
    }
    if source.startswith("flash"):
        disturb(rng, flash)
        call.update(flash)
    elif source == "packed_layout":
        call["lengths"] = lengths
        if rng.random() < 0.5:
            disturb(rng, flash)
            call.update(flash)
    elif source == "seq_idx":
        call["seq_idx"] = flash["seq_idx"]
    elif source == "k only":
        call["cu_seq_lens_k"] = flash["cu_seq_lens_k"]
    if source in ("packed_layout", "flash", "positions") or rng.random() < 0.2:
        positions = torch.tensor([positions_of(rng, row, style) for row in rows])
        if int(positions.min()) >= 0:
            positions = positions.to(rng.choice(INTEGERS) if rng.random() < 0.97 else torch.float32)
        if rng.random() < 0.02:
            positions = positions[:, :-1]
        call["position_ids"] = positions
    mask = mask_of(rng, len(rows), length)
    if mask is not None:
        call["attention_mask"] = mask
    if rng.random() < 0.1:
        call["use_cache"] = True
    return call


def meaning(call, *, ignores_position_ids, most=None):
    """Return the documents `(row, start, end, first position)` of a call, or `REFUSED`, or `UNPACKED`."""
    rows, length = call["input_ids"].shape
    positions, mask = call.get("position_ids"), call.get("attention_mask")
    ones = mask is not None and bool((mask != 0).all())
    explicit = call.get("lengths")
    told = offsets_of(call)
    if told == REFUSED:
        return REFUSED
    if told is not None:
        told = [b - a for a, b in itertools.pairwise(told) if b > a]
        if explicit not in (None, told):
            return REFUSED
        explicit = told
    if positions is not None:
        # what cannot be read as positions of this batch
        if positions.shape[1] != length or positions.is_floating_point():
            return REFUSED
        positions = positions.tolist()
    if explicit is None:
        starts = found_starts(positions, rows, length, mask, ones)
        if starts in (REFUSED, UNPACKED):
            extra = "cu_seq_lens_k" in call or (call.get("seq_idx") is not None and changes(call["seq_idx"]))
            return REFUSED if starts == REFUSED or extra else UNPACKED
        explicit = [b - a for row in starts for a, b in itertools.pairwise([*row, length])]
    return agreed(call, explicit, positions, mask, ones, ignores_position_ids, most)


def offsets_of(call):
    """Return `cu_seq_lens_q` as a list, `None` without it, `REFUSED` if invalid or unlike `cu_seq_lens_k`."""
    query = call.get("cu_seq_lens_q")
    if query is None:
        return None
    tensors = [query, *([call["cu_seq_lens_k"]] if call.get("cu_seq_lens_k") is not None else [])]
    if any(not isinstance(t, torch.Tensor) or t.is_floating_point() for t in tensors):
        return REFUSED
    lists = [t.tolist() for t in tensors]
    drop = [[a for a, b in itertools.pairwise([*each, None]) if a != b] for each in lists]
    sane = lists[0][0] == 0 and lists[0] == sorted(lists[0]) and len(drop[0]) > 1
    return lists[0] if sane and drop[0] == drop[-1] else REFUSED


def found_starts(positions, rows, length, mask, ones):
    """Return the columns where each row's documents start, from positions alone."""
    if positions is None:
        return UNPACKED
    starts = [[c for c in range(length) if c == 0 or row[c] != row[c - 1] + 1] for row in positions]
    if all(len(row) == 1 for row in starts):
        return UNPACKED
    if mask is not None and not ones:
        if mask.shape != (rows, length):
            return UNPACKED
        for row, real in zip(positions, mask.bool().tolist(), strict=True):
            seen = [p for p, r in zip(row, real, strict=True) if r]
            if any(b <= a for a, b in itertools.pairwise(seen)):
                return REFUSED
        return UNPACKED
    begins = {row[c] for row, columns in zip(positions, starts, strict=True) for c in columns}
    return starts if len(begins) == 1 else REFUSED


def agreed(call, lengths, positions, mask, ones, ignores_position_ids, most):
    """Return the documents if no other argument of the call contradicts them."""
    rows, length = call["input_ids"].shape
    if sum(lengths) != rows * length or (mask is not None and not (ones and mask.shape == (rows, length))):
        return REFUSED
    if any(call.get(f"max_length_{side}", max(lengths)) < max(lengths) for side in "qk"):
        return REFUSED
    documents, start = [], 0
    for n in lengths:
        row, column = divmod(start, length)
        if column + n > length:
            return REFUSED
        own = positions[row][column : column + n] if positions else list(range(n))
        if own[0] < 0 or own != list(range(own[0], own[0] + n)) or (own[0] and ignores_position_ids):
            return REFUSED
        if most is not None and own[-1] >= most:
            return REFUSED
        documents.append((row, column, column + n, own[0]))
        start += n
    begins = {(row, column) for row, column, _, _ in documents}
    seq_idx = call.get("seq_idx")
    if seq_idx is not None:
        inner = {(r, c) for r, row in enumerate(seq_idx.tolist()) for c in range(1, length) if row[c] != row[c - 1]}
        if inner != {(row, column) for row, column in begins if column}:
            return REFUSED
    return documents


def changes(seq_idx):
    """Tell whether document numbers contain any boundary."""
    return bool((seq_idx != seq_idx[:, :1]).any())


def seeds(count, *, seed=0):
    """Return seeded random generators of independent batches, by number."""
    return ((i, random.Random(f"{seed}-{i}")) for i in range(count))
