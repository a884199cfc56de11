"""Inference predicts classes, exports a trained network and loads it in Python."""
