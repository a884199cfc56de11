"""The runtime manages processes: ranks, seeds, signals, limits, files and errors."""
