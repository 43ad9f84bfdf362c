"""`trl-packfa plan`: predict the effect of packing on a dataset from its lengths and a config, before renting GPUs."""
