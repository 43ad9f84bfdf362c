"""Recipes: complete YAML files for `trl-packfa train --config`, and the same runs in code."""
