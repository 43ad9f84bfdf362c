"""Hooks for other trainers, one file each. None is a dependency: their code is imported only if they are installed."""
