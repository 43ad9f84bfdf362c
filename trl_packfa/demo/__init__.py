"""`trl-packfa demo`: the main job from nothing, with the public classes a user would take.

No hub, no network, no file outside: the text is the running Python's own documentation, the tokenizer is trained on
it, the model is built from a real config.
"""

from .run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
