"""Turns a run's metrics into a verdict, ``report.json``, an HTML page and a table of runs."""
