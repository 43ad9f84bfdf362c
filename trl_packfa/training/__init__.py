"""The SFT trainer, its config, and the parts that do its work. The preference trainers use many of these parts too."""
