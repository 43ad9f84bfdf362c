"""Scripts of `trl-packfa train` and `trl-packfa prepare`, for every trainer, as `trl.scripts` has TRL's."""
