"""``python -m wellfed`` and ``torchrun -m wellfed`` run the command ``wellfed``."""

from .cli.app import command

if __name__ == "__main__":
    command()
