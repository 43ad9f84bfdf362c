"""The proof of `share_prefixes=True`: compare rows whose common prefix runs once with rows that each hold it.

Both run without pads, which `unpadding.py` has proven. The control is a run in which one branch sees another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..layout.prefix_tree import SHORTEST
from ..patching.apply import PatchState
from ..patching.inspect import find_backbone, inner_model, known_ids, max_positions
from .compare import relative_difference
from .documents import draw_documents
from .engine import Run, compare
from .following import Trace
from .padded_runs import PaddedProbe
from .subject import Subject
from .unpadding_report import SharingReport

# Lengths in tokens: the common prefix, the three branches after it, and one more row that shares nothing.
_PREFIX, _BRANCHES, _OTHER = SHORTEST + 4, (11, 1, 24), 13


def measure_sharing(subject: Subject, state: PatchState, known: torch.Tensor, seed: int) -> SharingReport | None:
    """Compare rows that share their prefix with the same rows run separately; `None` if no rows are shared.

    The documents are drawn from `known`, token ids that the model knows.
    """
    assert state.unpadding is not None
    most = max_positions(find_backbone(subject.model, state.patch))
    sharing, room = state.unpadding.sharing, None if most is None else (most - _PREFIX) // 2
    if sharing is None or sharing.refusal or (room is not None and room < 1):
        return None
    branches = [min(length, room or length) for length in _BRANCHES]
    lengths = [_PREFIX, *branches, _OTHER]
    (prefix, *rest, other), _ = draw_documents(lengths, known, known_ids(inner_model(subject.model)), seed)
    probe = PaddedProbe(subject, state, [*(torch.cat([prefix, ids]) for ids in rest), other], seed)
    rows = probe.rows(left=False)
    call = probe.batch(rows)

    def separate(sign: float | None, handed: Mapping[int, Trace]) -> Run:
        return probe.run(call, rows, unpad=True, sign=sign, handed=handed)

    found = compare(
        subject,
        separate,
        [lambda sign, handed: probe.run(call, rows, unpad=True, shared=True, sign=sign, handed=handed)],
        rounding=separate,
    )
    alone, first = probe.run(call, rows, unpad=True), rest[0]
    # The control: one document of prefix, first and last branch, in which the last branch sees the first.
    tokens = torch.cat([prefix, first, rest[-1]])[None].to(probe.device)
    own = torch.cat([torch.arange(len(prefix)), torch.arange(len(prefix) + len(first), tokens.shape[1])])
    with torch.no_grad(), state.unpadding.unshared():
        states, _ = probe.score({"input_ids": tokens}, (1, tokens.shape[1]), own[-1:])
        (seeing,) = probe.documents_of(states, [own], tokens.shape)
    return SharingReport(**found.measured(), control=relative_difference(seeing, alone.outputs[len(rest) - 1]))
