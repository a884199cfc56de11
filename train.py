"""Train, evaluate or diagnose an image classifier: ``python train.py --help``.

In order: ``harness.cli.app`` composes the settings from ``conf/`` and the command line.
``harness.cli.job`` starts a process for each rank, and its ``main_worker`` connects the packages:
data, feed, tuning, training, report.
"""

from harness.cli.app import command

if __name__ == "__main__":
    command()
