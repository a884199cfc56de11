"""Shows one page in two places: ``report.html``, and a tab in TensorBoard.

Both show what the run's own files say (``report.json``, ``metrics.jsonl``, ``tuning.json``) with
the same scripts, which lie beside this file. A page for a whole sweep: ``wellfed page
multirun/DATE/TIME``. The standard library alone, so that TensorBoard starts as fast with it as
without.
"""
