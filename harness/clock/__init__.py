"""Where the time of a step went, as numbers."""
