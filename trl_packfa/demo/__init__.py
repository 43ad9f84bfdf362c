"""`trl-packfa demo`: a complete packed QLoRA fine-tune with the public classes that a user would take.

It needs no network and no file from outside. The text is the documentation of the running Python, the tokenizer is
trained on this text, and the model is built from a real config class.
"""

from .run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
