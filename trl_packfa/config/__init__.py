"""Configs of runs, and the table of what a run requires."""
