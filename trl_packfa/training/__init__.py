"""The trainer, its arguments, and the parts that it delegates to."""
