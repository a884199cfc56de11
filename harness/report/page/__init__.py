"""Shows one page in two places: ``report.html`` and a TensorBoard tab.

Both render the run's files (``report.json``, ``metrics.jsonl``, ``tuning.json``) with the scripts
in this folder. ``wellfed page multirun/DATE/TIME`` writes a page for a whole sweep. Only the
standard library is imported, so as not to slow TensorBoard's startup.
"""
