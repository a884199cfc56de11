"""Tells what bounds training without training: runs, verdict, and what changes would give."""
