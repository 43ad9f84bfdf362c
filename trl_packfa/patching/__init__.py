"""The transformers side: finds what a patch names in a model, puts the forwards in place, and takes them back."""
