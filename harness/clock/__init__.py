"""Measures the time of each part of a training step."""
