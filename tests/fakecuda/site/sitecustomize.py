"""Switches cuDNN off in each process, as it brings a CUDA runtime of its own.

Python imports this module at its start, where ``build.environment`` is in force.
"""

import importlib.machinery
import sys
from typing import Any

CUDNN = "torch.backends.cudnn"


class _Finder:
    """Stands before Python's own finders until torch asks for its module of cuDNN."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != CUDNN:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            # torch puts another object in the module's place
            sys.modules[name].enabled = False  # type: ignore[attr-defined]

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
