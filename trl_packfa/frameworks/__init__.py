"""Hooks for trainers that are not TRL's, one file each: Axolotl, ms-swift, LLaMA-Factory and transformers' `Trainer`.

None of them is a dependency, and none of their code is imported before it is there.
"""
