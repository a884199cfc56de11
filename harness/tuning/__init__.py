"""Tuning measures loader settings before training, and chooses among them."""
