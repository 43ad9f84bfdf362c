"""What a run is asked for: configs, and the table of what a run requires."""
