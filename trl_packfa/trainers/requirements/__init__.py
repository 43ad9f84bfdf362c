"""The rows of the table of requirements that need packages, models or data."""
