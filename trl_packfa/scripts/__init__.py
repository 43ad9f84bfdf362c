"""Scripts of the commands that train, prepare, check and merge, for every trainer, as `trl.scripts` has TRL's."""
