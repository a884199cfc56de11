"""What processors and workers can give, by what a sample and a step cost.

The laws are operational (Denning and Buzen 1978): with w seconds of wall and c of processor time a
sample, n workers give at most n / w images/s, and C processors C / (c + r + s), where receiving an
image takes r and the step s of them.
"""

from __future__ import annotations

import math


def roofline(cores: float, *each_s: float) -> float:
    """Returns the images/s at which loading and steps fill ``cores``.

    ``each_s`` are processor seconds an image, such as of loading, of receiving and of the step.
    """
    return cores / sum(each_s) if any(each_s) else math.inf


def workers_for(images_per_s: float, wall_s: float) -> int:
    """Returns the fewest workers for a rate, where a sample takes one of them ``wall_s``.

    At least 1; a twentieth of a worker is none.
    """
    return max(1, math.ceil(images_per_s * wall_s - 0.05))
