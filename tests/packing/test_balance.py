"""Who deals the documents of a step, and how long the busiest rank takes."""

import json

from rank_balance import main


def test_balance_is_told_by_who_deals(capsys):
    """Ours is at its bound; the padded order, the control, is far from it."""
    assert main(["--mixes", "uneven", "--ranks", "8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["longest document"] <= row["step"] <= 1.02 * row["longest document"] < row["padded order"]
    assert row["step"] <= min(row["by tokens"], row["by squares"])
