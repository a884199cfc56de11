"""docs/architecture.md: the way of one image names the functions that an image goes through."""

from __future__ import annotations

import importlib
import operator
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from pictures import photograph

from harness.data.datasets import ImageDataset
from harness.data.decode import DecodeOptions
from harness.data.storage import FolderSource
from harness.data.transforms import CropTransform
from harness.feed.base import Backend, FeedSettings
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed

PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
TEXT = PAGE[PAGE.index("## The way of one image") : PAGE.index("## The way of a setting")]
THREADS, PROCESSES = TEXT[TEXT.index("### By threads") :].split("### By processes")
# needs a GPU, a worker process or a whole run
ELSEWHERE = {"Engine._one_step", "Step.__call__"}


def rows(text: str) -> list[tuple[str, str, str]]:
    """The function, its file and how often it is called, for each function in a table."""
    found = []
    for line in text.splitlines():
        if ".py |" in line:
            _, _, functions, file, often, *_ = line.split("|")
            found += [
                (name, file.strip(), often.strip()) for name in re.findall("`([^`]+)`", functions)
            ]
    return found


SHARED = [
    row
    for row in rows(THREADS)
    if row[1] != "feed/threads.py" and not row[0].startswith("BufferPool")
]


@pytest.mark.parametrize(("function", "file", "often"), rows(TEXT))
def test_every_function_is_where_it_is_said_to_be(function: str, file: str, often: str) -> None:
    """A renamed or moved function is renamed or moved in the document too."""
    module = importlib.import_module(f"harness.{file.removesuffix('.py').replace('/', '.')}")
    assert callable(operator.attrgetter(function)(module))


@pytest.mark.parametrize(
    ("text", "ways"), [(THREADS, rows(THREADS)), (PROCESSES, SHARED + rows(PROCESSES))]
)
def test_the_counts_are_those_of_the_tables(text: str, ways: list[tuple[str, str, str]]) -> None:
    """Functions and files are counted as they are listed."""
    assert f"{len(ways)} functions in {len({file for _, file, _ in ways})} files" in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        pytest.param(ThreadFeed, rows(THREADS), id="threads"),
        pytest.param(ProcessFeed, SHARED + rows(PROCESSES), id="processes"),
    ],
)
def test_an_image_goes_that_way(
    kind: type[Backend],
    ways: list[tuple[str, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass over a folder calls every function that needs neither a GPU nor a whole run."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "cache"))
    for name in ("a/1.jpg", "b/2.jpg"):
        (tmp_path / "set" / name).parent.mkdir(parents=True)
        photograph("china").reduce(4).save(tmp_path / "set" / name)
    images = ImageDataset(
        FolderSource(tmp_path / "set"), CropTransform(32, hflip=0.0), DecodeOptions(), 32, 0
    )
    # the trainer itself stands for the worker process
    settings = FeedSettings(1, int(kind is ThreadFeed), False, None, False, 0.0, "fork")
    called = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        called.add(frame.f_code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        list(DataPrefetcher(kind(images, Order(2, 1), settings), "cpu", ahead=True))  # type: ignore
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {function for function, _, _ in ways} - called <= ELSEWHERE
