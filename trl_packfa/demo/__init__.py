"""`trl-packfa demo`: a complete packed QLoRA fine-tune without downloads, with the classes that a user would take."""

from .run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
