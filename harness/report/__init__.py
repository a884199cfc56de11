"""Figures in; a verdict, a report and a page out."""
