"""Output of a run on a terminal or in a pipe."""

# Defaults of tqdm in a pipe: no bar for work of less than five seconds, then one line every half minute.
BARS_AS_LINES = {
    "TQDM_DELAY": "5",
    "TQDM_MININTERVAL": "30",
    "TQDM_BAR_FORMAT": "{desc}: {n_fmt}/{total_fmt}, {remaining} to go\n",
}
