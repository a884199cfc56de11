"""Sensors of the machine, what a run writes, and the console."""
