"""What a run shows on a terminal or in a pipe."""
