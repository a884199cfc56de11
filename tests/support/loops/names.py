"""Prints what Python tells a script of itself, in a spawned process too."""

import multiprocessing
import pickle
import sys


class Settings:
    """Can be pickled by the name of its module."""


def told(_: object = None) -> str:
    names = {name: value for name, value in globals().items() if name.startswith("__")}
    loader = type(names.pop("__loader__")).__name__
    spec = getattr(names.pop("__spec__"), "name", None)
    path = sys.path[0]
    return repr((sorted(names), __file__, __package__, __cached__, loader, spec, path, sys.argv))


if __name__ == "__main__":
    print(told())
    print(type(pickle.loads(pickle.dumps(Settings()))) is Settings, type(__builtins__).__name__)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(type(pool.map(told, [Settings()])[0]))
