"""The step, the epoch, the evaluation and what is saved."""
