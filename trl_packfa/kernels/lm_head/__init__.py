"""Faster LM heads, which compute scores of trained positions only, in chunks."""
