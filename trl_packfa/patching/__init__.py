"""The transformers side: find what a patch names in a model, put the forwards in place, and take them back."""
