"""Runs training: steps, evaluations and checkpoints."""
