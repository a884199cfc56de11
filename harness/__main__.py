"""``python -m wellfed`` and ``torchrun -m wellfed`` are the command ``wellfed``."""

from .cli.app import command

if __name__ == "__main__":
    command()
