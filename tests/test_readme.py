"""What README and docs say works."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import wellfed
from commands import ran
from hydra import compose

from harness.cli.compose import prepared
from harness.clock.figures import Tag
from harness.config import Config
from harness.report.evidence import Bottleneck
from scripts.docs import architecture_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
OWN_LOOP = DOCS / "how-to/instrument-your-loop.md"
WATCH = DOCS / "how-to/watch-a-script.md"
PAGES = [README, CONTRIBUTING, *sorted(DOCS.rglob("*.md"))]
ARCHITECTURE = architecture_page.PAGE
RESULTS = sorted((ROOT / "scripts/bench/results").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def spans(page: Path) -> list[str]:
    """What stands between backticks, and each line of a block for the shell."""
    text = page.read_text(encoding="utf-8")
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    return re.findall(r"`([^`]+)`", outside) + [
        line for block in blocks(page, "sh") for line in block.splitlines()
    ]


SPANS = [(page, span) for page in PAGES for span in spans(page)]
# and what stands behind it
OUR_COMMAND = re.compile(
    r"(?:.*(?:python|torchrun|uv run) .*?train\.py|(?:uv run )?wellfed(?= (?:-m )?[\w.]+=))(.*)"
)
# those that watch have a script of the reader's
COMMANDS = sorted(
    {span for _, span in SPANS if OUR_COMMAND.fullmatch(span) and " watch " not in span}
)
NO_SETTINGS = {"name=value"}
OVERRIDES = sorted(
    {span for _, span in SPANS if re.fullmatch(r"[a-z_.]+=\S+(?: [a-z_.]+=\S+)*", span)}
    - NO_SETTINGS
)


def test_readme_is_short() -> None:
    """At most 150 lines."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_tests_run_on_a_fresh_machine() -> None:
    """The command beside the first one is complete, and is the gate's."""
    tests = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1]
    first = blocks(README, "sh")[0].splitlines()
    assert first[1:] == [f"pip install uv && {tests}"]
    assert tests.startswith("uv run --group dev pytest") and tests in spans(CONTRIBUTING)


def test_nothing_is_installed_by_our_name() -> None:
    """No page and no message fetches ``wellfed`` from an index, where the name is not ours."""
    files = [*PAGES, *(ROOT / "harness").rglob("*.py")]
    found = re.compile(r"pip install \S*wellfed")
    assert [file for file in files if found.search(file.read_text(encoding="utf-8"))] == []


def test_public_names_are_listed() -> None:
    """``dir(wellfed)`` has the names that are imported on demand."""
    assert {*wellfed.__all__} <= {*dir(wellfed)}


def max_of(images: torch.Tensor, labels: torch.Tensor) -> None:
    """A step."""
    torch.maximum(images.amax(), labels.amax())


RATES = r"\d+ images/s, waiting for data \d+% of the time"
GIVEN = {
    "device": "cpu",
    "loader": [(torch.zeros(4, 3, 8, 8), torch.zeros(4))] * 3,
    "train_step": max_of,
}


@pytest.mark.parametrize(
    ("block", "given", "printed"),
    [
        (0, GIVEN, RATES),
        (1, {}, RATES),
        (2, {}, r"^torch.float32 (cpu|cuda:0) \d+.jpg"),
        (3, {}, "(?i)the model takes"),
        (4, GIVEN, ""),
    ],
)
def test_the_examples_for_a_loop_of_ones_own_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kept_globals: None,
    tmp_path: Path,
    block: int,
    given: dict[str, Any],
    printed: str,
) -> None:
    """A clock around a loader, a prefetcher, tuning: they run and print their figures."""
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(OWN_LOOP, "python")[block], OWN_LOOP.name, "exec"), {**given})
    assert re.search(printed, capsys.readouterr().out)


WATCHED = """
import torch

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
loader = [(torch.ones(4, 1), None)] * 60

def train_step(images, labels):
    (images * weight).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "page", [README, pytest.param(WATCH, marks=pytest.mark.slow)], ids=lambda page: page.name
)
def test_a_loader_that_is_watched(page: Path, tmp_path: Path) -> None:
    """The block with ``watched`` runs, and ends with a report."""
    block = next(block for block in blocks(page, "python") if "watched(loader)" in block)
    (tmp_path / "loop.py").write_text(WATCHED + block, encoding="utf-8")
    done = ran(sys.executable, "loop.py", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.glob("outputs/*/*/report.json")
    assert json.loads(report.read_text())["steps"] == 60
    assert report.with_suffix(".html").is_file()


@pytest.mark.parametrize(
    ("block", "ours"),
    [(1, "wellfed|clock|DataPrefetcher|batches"), (2, "wellfed|report|train_step")],
)
def test_the_examples_change_few_lines(block: int, ours: str) -> None:
    """At most ten lines of each are ours."""
    assert 0 < len(re.findall(rf"^.*(?:{ours}).*$", blocks(OWN_LOOP, "python")[block], re.M)) <= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(composed: Callable[..., Config], command: str) -> None:
    """Each command's settings exist and fit together."""
    arguments = shlex.split(OUR_COMMAND.sub(r"\1", command))
    if arguments[:1] in (["page"], ["compare"]):
        # they take folders, and no settings
        return
    overrides = [
        re.sub(r",(?![^[{]*[]}]).*", "", text)
        for text in arguments
        if not text.startswith("-") and text != "job"
    ]
    # the launchers are no part of the tools that tests need
    plain = [text for text in overrides if not text.startswith("hydra/")]
    composed(*prepared(plain).overrides)


def test_every_setting_composes(composed: Callable[..., Config]) -> None:
    """Each setting in backticks exists, and takes its value; different ones compose together."""
    rounds: list[dict[str, str]] = []
    for overrides in OVERRIDES:
        typed = {text.partition("=")[0]: text for text in prepared(overrides.split()).overrides}
        free = (each for each in rounds if not each.keys() & typed.keys())
        if (place := next(free, None)) is None:
            rounds.append(place := {})
        place |= typed
    for each in rounds:
        compose("config", overrides=[*each.values()])


def test_commands_are_found() -> None:
    """The patterns above find the tables."""
    assert len(COMMANDS) >= 20
    assert len(OVERRIDES) >= 60


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Links, pictures and the sources of ``<picture>`` are files of the repository."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert [
        link for link in found if not link.startswith("http") and not (page.parent / link).exists()
    ] == []


def test_every_file_that_is_named_is_there() -> None:
    """Paths of our folders in backticks, and the scripts of commands."""
    named = {
        path
        for _, span in SPANS
        for path in re.findall(r"\b(?:harness|scripts|tests|conf|docs)/[\w./-]*\w", span)
    }
    made = {"conf/data/NAME.yaml"}
    assert len(named) >= 20
    assert [path for path in sorted(named - made) if not (ROOT / path).exists()] == []


def test_the_page_of_the_architecture_is_up_to_date() -> None:
    """Else: ``uv run python -m scripts.docs.architecture_page``."""
    assert ARCHITECTURE.read_text(encoding="utf-8").startswith(architecture_page.drawn())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ways_of_the_architecture_are_up_to_date() -> None:
    """The functions that a traced run calls, with their tasks."""
    assert ARCHITECTURE.read_text(encoding="utf-8") == architecture_page.page()


def test_the_page_of_settings_is_up_to_date() -> None:
    """Else: ``uv run python -m scripts.docs.settings_page``."""
    source = "from scripts.docs import settings_page; print(settings_page.page(), end='')"
    made = ran(sys.executable, "-c", source)
    assert made.returncode == 0, made.stderr
    assert made.stdout == (DOCS / "reference/settings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", get_args(Bottleneck))
def test_every_verdict_is_explained(name: str) -> None:
    """With its name in ``report.json``."""
    page = DOCS / "reference/verdicts.md"
    assert f"(`{name}`) |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("tag", list(Tag), ids=str)
def test_every_tag_is_explained(tag: Tag) -> None:
    """In the table of tags."""
    assert f"`{tag}`" in (DOCS / "reference/metrics.md").read_text(encoding="utf-8")
