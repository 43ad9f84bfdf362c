"""Files of checkpoints and of finished runs."""
