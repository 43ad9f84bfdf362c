"""`trl_packfa.plot`: what is drawn is the mask that the layout means."""

import sys

import pytest
import tiny
import torch
from dense import dense_mask

import trl_packfa
from trl_packfa import PackedLayout
from trl_packfa.errors import InvalidLayout, MissingPackage

pytest.importorskip("matplotlib")
LAYOUT = PackedLayout.from_lengths([5, 9, 5, 1])


@pytest.mark.parametrize("window", [None, 4, 50])
def test_the_figure_covers_what_the_mask_allows(window):
    from matplotlib.patches import Polygon
    from matplotlib.path import Path

    figure = trl_packfa.plot(LAYOUT, sliding_window=window)
    outlines = [Path(patch.get_xy()) for patch in figure.axes[0].patches if isinstance(patch, Polygon)]
    drawn = [[any(o.contains_point((k + 0.3, q + 0.7)) for o in outlines) for k in range(20)] for q in range(20)]
    assert torch.equal(torch.tensor(drawn), dense_mask(LAYOUT, window))
    assert not torch.equal(torch.tensor(drawn), dense_mask(PackedLayout.from_lengths([6, 8, 5, 1]), window))


def test_a_batch_is_drawn_into_a_file(tmp_path):
    batch = tiny.batch(tiny.documents(), pad_to_multiple_of=16)
    for name in ("row.svg", "row.png"):
        figure = trl_packfa.plot(batch, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert figure.axes[0].get_title() == "5 documents, 80 tokens"


def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch):
    with pytest.raises(InvalidLayout, match=r"a batch with \['input_ids'\] has no document boundaries"):
        trl_packfa.plot({"input_ids": torch.ones(1, 4)})
    with pytest.raises(InvalidLayout, match=r"cannot draw into .*row\.docx"):
        trl_packfa.plot(LAYOUT, tmp_path / "row.docx")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"(?s)plot needs matplotlib.*pip install 'trl-packfa\[plots\]'"):
        trl_packfa.plot(LAYOUT)
