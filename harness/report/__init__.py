"""The report turns a run's figures into a verdict, ``report.json``, a page and a table of runs."""
