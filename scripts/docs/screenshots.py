"""Draws the pictures of the README: a run that waits for data beside the same run, tuned.

Both runs are real. Their step sleeps for 50 ms in place of a GPU, and every file is 5 ms late.
Needs chromium and chromium-driver.

    uv run python -m scripts.docs.screenshots
    uv run python -m scripts.docs.screenshots --folder outputs/pictures  # draws existing runs
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from scripts.bench.tuner.slept import READ, STEP

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
COMMON = (
    "data=shapes", "data.generate.train_images=2000", "data.generate.val_images=100",
    "trainer.epochs=10", "device=cpu", "checkpoint.enabled=false", "watch.tensorboard=false",
)  # fmt: skip
RUNS = {
    "stalled": ("loader.backend=threads", "loader.num_workers=2"),
    "tuned": ("loader.autotune=true", "tuner.fresh=true"),
}
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
# page width, in CSS pixels
WIDTH = 540
HEIGHT = 1600
# picture pixels per CSS pixel
SCALE = 1.5
# between the two pages, in picture pixels
GAP = 24
# WebP quality, 0..100
QUALITY = 70
# the top and the bottom of each part: heading and verdict; the bar of a step's time and its table
BOUNDS = """
    const box = (element) => element.getBoundingClientRect();
    const isBar = (section) => /^One step/.test(section.innerText);
    const bar = [...document.querySelectorAll("section")].find(isBar);
    return [[0, box(document.querySelector(".verdict")).bottom + 24],
            [box(bar).top, box(bar.querySelector("table")).bottom + 2]];
"""
WAIT_S = 30


def train(folder: Path) -> None:
    """Runs both, each in its own folder below ``folder``."""
    env = os.environ | {
        STEP: "50",
        READ: "5",
        "WELLFED_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    for name, settings in RUNS.items():
        place = f"hydra.run.dir={folder / name}"
        command = [
            sys.executable,
            str(ROOT / "scripts/bench/tuner/slept_run.py"),
            *COMMON,
            *settings,
            place,
        ]
        subprocess.run(command, check=True, env=env, cwd=folder)


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """Yields a headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver")))
    )
    try:
        yield driver
    finally:
        driver.quit()


def parts(driver: webdriver.Chrome, page: Path, scheme: str) -> list[Image.Image]:
    """Returns two pictures of ``page``: its verdict, and the breakdown of a step's time.

    ``scheme`` is light or dark.
    """
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(page.as_uri())
    WebDriverWait(driver, WAIT_S).until(
        lambda shown: shown.find_elements(By.CSS_SELECTOR, ".chart svg")
    )
    whole = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    bounds = [[round(SCALE * edge) for edge in pair] for pair in driver.execute_script(BOUNDS)]
    return [whole.crop((0, top, whole.width, bottom)) for top, bottom in bounds]


def beside(left: Sequence[Image.Image], right: Sequence[Image.Image]) -> Image.Image:
    """Returns one picture of two pages' parts: a column per page, a row per part."""
    heights = [max(pair.height for pair in row) for row in zip(left, right, strict=True)]
    width = left[0].width
    whole = Image.new("RGB", (2 * width + GAP, sum(heights)), left[0].getpixel((0, 0)))
    for i, row in enumerate(zip(left, right, strict=True)):
        for column, part in enumerate(row):
            whole.paste(part, (column * (width + GAP), sum(heights[:i])))
    return whole


def draw(folder: Path) -> None:
    """Writes a picture for each scheme to ``docs/pictures``."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with browser() as driver:
        for scheme in ("light", "dark"):
            stalled, tuned = [parts(driver, folder / name / "report.html", scheme) for name in RUNS]
            path = PICTURES / f"stalled_and_tuned_{scheme}.webp"
            beside(stalled, tuned).save(path, quality=QUALITY, method=6)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


def main() -> int:
    """Trains both runs unless they exist, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not all((folder / name / "report.html").is_file() for name in RUNS):
            train(folder)
        draw(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
