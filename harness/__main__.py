"""``python -m wellfed`` and ``torchrun -m wellfed`` are the command ``wellfed``."""

from .app import command

if __name__ == "__main__":
    command()
