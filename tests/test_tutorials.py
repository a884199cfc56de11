"""The commands of README and the tutorials, run in their order."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from harness.data.shapes import draw

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs/tutorials"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# only these words of a line are the same on every machine
VARIES = (
    "verdict",
    "suggestion",
    "The model takes",
    "3 classes",
    "tuner=auto",
    "the same without tuning",
    "loader ",
)
NUMBER = r"[\d.,e:/+-]+"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Block(NamedTuple):
    """A fenced block, with the prose before and after it."""

    language: str
    text: str
    before: str
    after: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    ends = [0]
    found = [*BLOCK.finditer(text)]
    for i, block in enumerate(found):
        following = found[i + 1].start() if i + 1 < len(found) else len(text)
        yield Block(
            block[1], block[2], text[ends[-1] : block.start()], text[block.end() : following]
        )
        ends.append(block.end())


def shape(line: str) -> str:
    """A pattern for ``line`` with other figures, values of settings and folders."""
    line = line.removeprefix("wellfed: ").rstrip()
    for start in VARIES:
        if line.startswith(start):
            return ".*" + re.escape(start) + ".*"
    if line.startswith("|"):
        # a page may leave columns out
        return r".*".join(map(shape, filter(None, line.split("|")))) + ".*"
    pattern = re.escape(line.strip()).replace(re.escape("..."), ".*")
    pattern = re.sub(r"=[\w.\\-]+", r"=\\S+", pattern)
    pattern = re.sub(r"(?:\\[+-])?\d(?:\d|\\?[.,:/-](?=\d)|e\\-\d)*", lambda _: NUMBER, pattern)
    # the interval of a rate is unknown after few measurements
    pattern = pattern.replace(f"{NUMBER}\\ ±{NUMBER}%", f"(about )?{NUMBER}( ±{NUMBER}%)?")
    return re.sub(r"(\\ )+", r"\\s+", pattern)


class Reader:
    """Somebody who types what a page says, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = ""
        scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        cache = {"WELLFED_CACHE": str(folder / "cache")}
        self.env = {**os.environ, **cache, "PATH": scripts, "COLUMNS": "300"}

    def types(self, command: str, stops_at: str | None = None) -> None:
        """Runs ``command``, up to Ctrl-C once ``stops_at`` is printed."""
        command = command.removeprefix("pip install uv && ").replace("uv run ", "")
        if command.startswith("train.py"):
            command = f"python {shlex.quote(str(ROOT))}/{command}"
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"] if stops_at else ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            assert run.stdout is not None
            lines = ""
            for line in run.stdout:
                lines += line
                if stops_at and re.match(stops_at, line):
                    run.send_signal(signal.SIGINT)
                    stops_at = None
        self.seen += lines
        stopped = 130 if "stopped after" in lines else 0
        refused = 3 if "mode=verify" in command else stopped
        assert run.returncode == refused, (command, lines[-2000:])

    def saw(self, text: str) -> None:
        """Each line of ``text`` was printed, or is in a table that a command wrote."""
        tables = [path.read_text() for path in self.folder.rglob("*.csv")]
        seen = "\n".join([self.seen, *tables])
        missing = [
            line
            for line in text.splitlines()
            if line.strip("$. ")
            and not re.search(rf"^\W*(wellfed: )?{shape(line)}[\s|]*$", seen, re.MULTILINE)
        ]
        assert not missing, f"{missing} not in {self.seen[-4000:]}"

    def follows(self, page: Path) -> None:
        """Does what ``page`` says."""
        for language, text, before, after in blocks(page):
            saved = re.findall(r"[Ss]ave (?:this|the \w+ ?\w*) as\s+`(\w+\.py)`", before)
            if saved:
                (self.folder / saved[-1]).write_text(text, encoding="utf-8")
                for name in re.findall(r"run `python (\w+\.py)`", before):
                    self.types(f"python {name}")
            elif language == "python" and "`DataLoader`:" in before:
                script = self.folder / "train.py"
                head, loader, rest = script.read_text().partition("loader = ")
                script.write_text(f"import wellfed\n{head}{text}{loader}{rest}")
            elif language == "python":
                (self.folder / "typed.py").write_text(text)
                self.types("python typed.py")
            elif language == "sh":
                for command in text.splitlines():
                    stops = r"epoch 1/\d: " if "Press Ctrl-C" in after else None
                    self.types(command, stops)
                    if stops:
                        stopped = command
            elif language == "":
                self.saw(text)
                if "Repeat the command" in after:
                    self.types(stopped)


@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_works_as_typed(page: Path, tmp_path: Path) -> None:
    """Its commands end well and print what the page shows, with other figures."""
    Reader(tmp_path).follows(page)


def test_the_readme_works_as_typed(tmp_path: Path) -> None:
    """The quick start prints its summary; a folder is trained on, predicted and exported."""
    found = [*blocks(ROOT / "README.md")]
    watch, quick, summary, folder, load, _, diagnose = found
    reader = Reader(tmp_path)
    reader.types(quick.text.splitlines()[0])
    reader.saw(summary.text)
    for i in range(40):
        for part, count in (("FOLDER/train", 40), ("FOLDER/val", 8), ("NEW_IMAGES", 2)):
            if i < count:
                path = tmp_path / part / "ab"[i % 2] / f"{i}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                image = draw(i % 2, 10, 96, 96, np.random.default_rng(i))
                Image.fromarray(image.astype("uint8")).save(path)
    for command in (*folder.text.splitlines(), *diagnose.text.splitlines()):
        # published weights are a download
        small = "model.name=resnet18 data.image_size=64 trainer.epochs=1 loader.batch_size=8"
        command = command.replace("model.name=resnet50 model.weights=DEFAULT", small)
        few = "model.name=resnet18 data.image_size=64 loader.batch_size=8"
        reader.types(command.replace("model.name=resnet50", few))
    (tmp_path / "cat.jpg").write_bytes((tmp_path / "FOLDER/val/a/0.jpg").read_bytes())
    (tmp_path / "typed.py").write_text(load.text)
    reader.types("python typed.py")
    assert (tmp_path / "outputs/new/predictions.csv").exists()
    # its first lines are those of the tutorial
    tutorial = (TUTORIALS / "fix-a-slow-script.md").read_text(encoding="utf-8")
    told = tutorial.splitlines()
    for line in watch.text.splitlines():
        if re.match(r"wellfed: (?!verdict)", line):
            assert any(each.startswith(line.rstrip(" .,")) for each in told), line
