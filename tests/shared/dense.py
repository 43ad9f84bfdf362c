"""The attention mask that a layout stands for. It is quadratic in the tokens, so the package has none."""

import torch

from trl_packfa.layout.shared_prefix import visible_segments


def dense_mask(layout, sliding_window=None):
    """Return the mask, bool, `(T, T)`: the tokens that each token sees."""
    ids, position = layout.document_ids().flatten().long(), layout.position_ids().flatten()
    distance = position[:, None] - position[None, :]
    visible = torch.eye(len(layout.lengths), dtype=torch.bool, device=layout.cu_seqlens.device)
    for segment, segments in enumerate(visible_segments(layout.documents or ())):
        visible[segment, list(segments)] = True
    distance = distance if layout.causal else distance.abs()
    mask = visible[ids][:, ids] & (distance >= 0)
    if sliding_window is not None:
        mask &= distance < sliding_window
    spans = () if layout.bidirectional is None else layout.bidirectional.of_window(sliding_window)
    for start, stop in spans:
        for first, last in spans if layout.bidirectional.joined else [(start, stop)]:
            mask[start:stop, first:last] |= ids[start] == ids[first]
    return mask
