"""TRL's trainers without padding."""
