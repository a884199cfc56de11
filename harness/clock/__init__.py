"""The clock measures the time of each part of a training step."""
