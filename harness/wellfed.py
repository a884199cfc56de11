"""The front door for a loop of your own: ``from wellfed import DataPrefetcher, StepClock, tune``.

The build puts this file beside the package, as the module ``wellfed``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import harness

if TYPE_CHECKING:
    from harness import *  # noqa: F403


# Whatever harness shows: a checkout's environment has a copy of this file, which must not age.
def __getattr__(name: str) -> Any:
    return getattr(harness, name)


if __name__ == "__main__":
    from harness.app import command

    command()
