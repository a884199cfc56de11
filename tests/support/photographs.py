"""Two photographs of 640 x 427 pixels that come with scikit-learn.

Read without what importing scikit-learn takes.
"""

from importlib.util import find_spec
from pathlib import Path

from PIL import Image

NAMES = ("china", "flower")


def photograph(name: str) -> Image.Image:
    """One of ``NAMES``, in mode RGB."""
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    return Image.open(Path(spec.origin).parent / "datasets" / "images" / f"{name}.jpg").convert(
        "RGB"
    )
