"""Samples to batches, and batches to the device before the step asks for them."""
