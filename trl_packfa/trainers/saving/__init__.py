"""What a checkpoint and a finished run keep."""
