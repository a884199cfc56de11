"""``python -m harness`` and ``torchrun -m harness`` are the command ``wellfed``."""

from harness.app import command

if __name__ == "__main__":
    command()
