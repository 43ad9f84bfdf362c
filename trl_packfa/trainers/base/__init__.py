"""Common base of the packed trainers: arguments, models and runs."""
