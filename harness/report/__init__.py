"""Turns a run's figures into a verdict, ``report.json``, an HTML page and a table of runs."""
