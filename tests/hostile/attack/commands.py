"""All cases of ``tests/hostile/attack/run.py``, by class."""

from __future__ import annotations

from random import Random

from tests.hostile.attack import ends as attack_ends
from tests.hostile.attack import files as attack_files
from tests.hostile.attack import settings as attack_settings
from tests.hostile.attack.places import Case

_OF = {
    "settings": (attack_settings.settings, "one line, exit code 2; a value that is taken is right"),
    "files of settings": (attack_settings.files, "one line, exit code 2; nothing in it runs"),
    "flags of Hydra": (attack_settings.flags, "one line, exit code 2, or the flag's own output"),
    "variables": (attack_settings.variables, "one line, or the plain run's weights"),
    "run folders": (attack_files.folders, "exit code 2 or 7, or a run; nothing beside it changes"),
    "data folders": (attack_files.data, "exit code 3, or the plain run's weights"),
    "checkpoints": (attack_files.checkpoints, "exit code 4, or the plain run's weights"),
    "caches": (attack_files.caches, "made again; the plain run's weights"),
    "limits": (attack_ends.limits, "exit code 6, 7 or 8, or the plain run's weights"),
    "signals": (attack_ends.signals, "128 + n; the next start ends with the plain run's weights"),
    "two at once": (attack_ends.pairs, "exit code 9, or the plain run's weights"),
    "sweeps": (attack_ends.sweeps, "a line and the exit code of each failed job"),
    "page and compare": (attack_ends.pages, "a page or a line; nothing leaks"),
}
KINDS = tuple(_OF)
REQUIRED = {kind: required for kind, (_, required) in _OF.items()}


def cases(draw: Random) -> list[Case]:
    """Returns the cases of all classes, with the values, damages and moments that ``draw`` gives.

    Each class draws for itself, so that one alone has the same cases as among the others.
    """
    seed = draw.random()
    found = [
        case._replace(kind=kind)
        for kind, (make, _) in _OF.items()
        for case in make(Random(f"{seed} {kind}"))
    ]
    return [
        case._replace(name=f"{case.name} ({number})") for number, case in enumerate(found, start=1)
    ]
