"""What the packed trainers share."""
