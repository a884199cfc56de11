"""Training runs the epochs: steps, evaluations and checkpoints."""
