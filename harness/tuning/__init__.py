"""Measures loader settings before training and chooses the best."""
