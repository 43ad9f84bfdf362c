"""What the trainers share: fields, models, datasets, step cutting, checkpoints, run folder, memory and speed."""
