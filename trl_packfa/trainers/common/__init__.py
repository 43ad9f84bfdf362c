"""Code that all trainers share: fields, models, datasets, step cutting, checkpoints, run folder, memory and speed."""
