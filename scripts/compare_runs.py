"""The name that ``wellfed compare`` had: ``uv run scripts/compare_runs.py FOLDER FOLDER``."""

import sys

from harness.report.compare.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
