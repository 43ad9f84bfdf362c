"""`trl-packfa demo`: a complete packed QLoRA fine-tune without downloads, by the commands that a user would run."""
