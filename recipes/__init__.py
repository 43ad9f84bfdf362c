"""Recipes: complete YAML files for `trl-packfa train --config`, and similar runs in code."""
