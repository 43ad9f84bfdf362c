"""What a run shows on a terminal or in a pipe."""

# Defaults of tqdm for a pipe: nothing of what takes less than five seconds, then a line every half minute.
BARS_AS_LINES = {
    "TQDM_DELAY": "5",
    "TQDM_MININTERVAL": "30",
    "TQDM_BAR_FORMAT": "{desc}: {n_fmt}/{total_fmt}, {remaining} to go\n",
}
