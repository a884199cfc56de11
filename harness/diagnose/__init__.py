"""Diagnosis measures the bottleneck without training; verification lists unreadable images."""
