"""Train, evaluate or diagnose an image classifier: ``python train.py --help``.

In order: ``harness.app`` composes the settings of ``conf/`` and the command line. ``harness.job``
starts a process for each rank, and its ``main_worker`` wires the rooms: data, feed, tuning,
training, watch.
"""

from harness.app import command

if __name__ == "__main__":
    command()
