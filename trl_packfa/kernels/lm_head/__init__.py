"""The LM head where no Triton kernel is: only trained positions are scored, some at a time."""
