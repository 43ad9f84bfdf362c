"""Hooks for other trainers, one file each: Axolotl, ms-swift, LLaMA-Factory and transformers' `Trainer`.

None of these frameworks is a dependency. Their code is imported only if they are installed.
"""
