"""Hooks measure an existing training loop without changing it."""
