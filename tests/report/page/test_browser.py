"""The page as people see it, in headless Chromium: drawn, steered, silent on the console."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import pytest
import runs
from PIL import Image

pytest.importorskip("selenium", reason="needs selenium (uv sync --group dev)")
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from harness.monitor.writer import RunWriter
from harness.report.page.document import write_report, write_sweep

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--window-size=1280,900",
)  # fmt: skip
WAIT_S = 30

T = TypeVar("T")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver (apt-get install)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One Chromium for all tests, with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of all kinds of runs."""
    root = tmp_path_factory.mktemp("pages")
    for make in (runs.long_run, runs.cpu_run, runs.interrupted, runs.damaged):
        made = make(root / make.__name__)
        if make is runs.long_run:
            runs.add_mistakes(made, ["cat", "dog"])
        write_report(made)
    write_sweep(runs.sweep(root / "sweep"))
    return root


@pytest.fixture
def show(browser: webdriver.Chrome, folder: Path) -> Iterator[Callable[..., webdriver.Chrome]]:
    """Opens a page of a width in light or dark, drawn to its end, with a silent console."""

    def opened(page: str, width: int = 1280, scheme: str = "light") -> webdriver.Chrome:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get((folder / page / "report.html").as_uri())
        until(browser, lambda: one(browser, ".chart svg"))
        return browser

    yield opened
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []


def until(browser: webdriver.Chrome, condition: Callable[[], T]) -> T:
    """What ``condition`` gives once it is true."""
    return WebDriverWait(browser, WAIT_S, 0.05, [WebDriverException]).until(lambda _: condition())


def one(browser: webdriver.Chrome, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements(By.CSS_SELECTOR, selector)]


def color_at(browser: webdriver.Chrome, script: str) -> tuple[int, ...]:
    """The color on the screen where ``script`` says, ``[x, y]`` of the visible part."""
    x, y = browser.execute_script(script)
    return (
        Image.open(io.BytesIO(browser.get_screenshot_as_png()))
        .convert("RGB")
        .getpixel((int(x), int(y)))
    )  # type: ignore[return-value]


MIDDLE_OF_SPIKE = """
    const bar = document.querySelector(`.run .spike[data-step="%d"] .spike-bar`);
    bar.closest("svg").scrollIntoView({ block: "center" });
    const box = bar.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + 12];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_spike_of_a_long_run_is_drawn(
    show: Callable[..., webdriver.Chrome], scheme: str
) -> None:
    """All four marks are on the screen in the spikes' color, and named below the chart."""
    page = show("long_run", scheme=scheme)
    marks = page.find_elements(By.CSS_SELECTOR, ".spike")
    assert {int(mark.get_attribute("data-step") or 0) for mark in marks} == set(runs.SPIKES)
    expected = {"light": (156, 0, 68), "dark": (255, 134, 176)}[scheme]
    for step in runs.SPIKES:
        assert color_at(page, MIDDLE_OF_SPIKE % step) == expected
    assert len(
        texts(page, ".spikes li")
    ) == 4 and "2.60 s in steps 10,491 to 10,500, mostly starved" in texts(page, ".spikes li")


def test_no_label_lies_across_a_longer_spike(show: Callable[..., webdriver.Chrome]) -> None:
    """The spike of 400 ms beside the one of 2.60 s is told below the chart."""
    page = show("long_run")
    assert set(texts(page, ".run .spike-text")) == {"2.60 s", "900 ms", "650 ms"}


def test_contents_lead_to_each_section(show: Callable[..., webdriver.Chrome]) -> None:
    """A button for each section brings its heading into view, and the keyboard with it."""
    page = show("long_run")
    assert texts(page, ".contents button") == texts(page, ".run section > h2")
    page.find_elements(By.CSS_SELECTOR, ".contents button")[-1].click()
    assert page.switch_to.active_element.text == "Settings and environment"


def test_every_figure_of_the_steps_is_listed(show: Callable[..., webdriver.Chrome]) -> None:
    """The table under the step has each figure that the report holds, with what it says."""
    page = show("long_run")
    page.execute_script("document.querySelector('.run section details').open = true")
    rows = until(page, lambda: texts(page, ".run section details tbody tr"))
    assert any(row.startswith("data wait ms ") and row.endswith("has queued work") for row in rows)
    assert any(row.startswith("stall fraction 38.7%") for row in rows)


def test_without_workers_none_is_spoken_of(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Where the training process loads, its stages are its own."""
    write_report(runs.cpu_run(tmp_path, loader={"num_workers": 0}))
    browser.get((tmp_path / "report.html").as_uri())
    until(browser, lambda: one(browser, ".chart svg"))
    assert texts(browser, ".stages caption") == ["per sample, in the training process"]


def test_windows_that_hold_spikes_are_counted(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """All are counted, one of each group is marked, and the twelve longest are told."""
    lines = [
        runs.window(step, {"compute": 5.0}, 90.0 if step % 50 == 0 else None)
        for step in range(10, 40_001, 10)
    ]
    write_report(runs.write(tmp_path, report=runs.report(), lines=lines))
    browser.get((tmp_path / "report.html").as_uri())
    until(browser, lambda: one(browser, ".chart svg"))
    assert texts(browser, ".spikes p")[0].startswith(
        "▼ 800 windows have an outlier step; the longest of each group is marked; the 12 "
        "longest of those marked:"
    )
    assert len(browser.find_elements(By.CSS_SELECTOR, ".spike")) == 400


def test_what_was_typed_can_be_pasted(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """A shell reads the same words."""
    typed = [
        "data.root=/my images/é",
        "loader.num_workers=2",
        "run.name=it's",
        "+x=[1,2]",
        "y=$HOME",
    ]
    write_report(runs.cpu_run(tmp_path, run={"overrides": typed}))
    browser.get((tmp_path / "report.html").as_uri())
    line = until(
        browser, lambda: browser.find_element(By.XPATH, "//p[contains(., 'Typed: ')]//code").text
    )
    assert shlex.split(line) == typed and line == shlex.join(typed)


def test_the_newest_runs_are_looked_at_first(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Of thirteen runs the newest is open, and all but the oldest have a chart."""
    for job in range(13):
        runs.cpu_run(tmp_path / str(job), steps=50)
        for file in ("report.json", "metrics.jsonl"):
            os.utime(tmp_path / str(job) / file, (1e9 + (job - 5) % 13,) * 2)
    write_sweep(tmp_path)
    browser.get((tmp_path / "report.html").as_uri())
    until(browser, lambda: texts(browser, ".detail h2")[:1] == ["Run 4"])
    assert texts(browser, ".multiples figcaption button") == [
        str(job) for job in range(13) if job != 5
    ]


def test_the_slowest_rank_is_named(show: Callable[..., webdriver.Chrome]) -> None:
    """A run on several ranks has a row for each, with absent figures said."""
    page = show("long_run")
    assert texts(page, "[aria-label=Ranks] tbody th") == ["rank 0", "rank 1 longest step"]
    assert texts(page, "[aria-label=Ranks] tbody tr:last-child td") == [
        "101 ms",
        "30.0 ms",
        "not available",
        "20.0 ms",
    ]


def test_spikes_can_be_drawn_at_full_height(show: Callable[..., webdriver.Chrome]) -> None:
    """On request the axis reaches to the longest step, and marks differ as the steps do."""
    page = show("long_run")
    one(page, ".spikes button").click()
    heights = page.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('.spike')].map((mark) =>"
        " [mark.dataset.ms, mark.querySelector('.spike-bar').getBoundingClientRect().height]))"
    )
    assert heights["900"] / heights["2600"] == pytest.approx(900 / 2600, abs=0.02)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (
            "long_run",
            (
                "GPU memory\n21.3 GB\npeak allocation, 9.80 GB in evaluation; 24.0 GB reserved "
                "of "
                "80.0 GB"
            ),
        ),
        ("cpu_run", "GPU memory\nnot available\nno NVIDIA GPU reported it"),
    ],
)
def test_the_peak_of_the_gpus_memory_is_shown(
    show: Callable[..., webdriver.Chrome], page: str, said: str
) -> None:
    """The larger of training's and evaluation's, beside what torch has reserved."""
    assert said in texts(show(page), ".figures > div")


@pytest.mark.parametrize("page", ["cpu_run", "interrupted", "damaged"])
def test_pages_of_all_kinds_are_drawn(show: Callable[..., webdriver.Chrome], page: str) -> None:
    """What is not there is said with its reason, and no text became an element."""
    browser = show(page)
    said = one(browser, "main").text
    assert "not available" in said and "undefined" not in said and "NaN" not in said
    assert (
        browser.execute_script("return document.querySelectorAll('main img, main script').length")
        == 0
    )


def test_figures_of_other_types_are_one_line(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """A report that somebody has edited is no page, and its text stays text."""
    write_report(runs.write(tmp_path, report=runs.report(verdict="<img src=x>", shares=[1])))
    browser.get((tmp_path / "report.html").as_uri())
    assert until(browser, lambda: one(browser, ".detail [role=alert]")).text.startswith("run ")
    assert not browser.find_elements(By.CSS_SELECTOR, ".detail img, .detail section")


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><b>",
    *(f"class {place}" for place in range(8)),
]


@pytest.mark.parametrize("names", [["cat", "dog"], HOSTILE, [f"n{i:04d}" for i in range(1000)]])
def test_what_went_wrong_is_shown(
    browser: webdriver.Chrome, tmp_path: Path, names: list[str]
) -> None:
    """Classes, worst first, the matrix, kinds of mistakes and pictures; names stay text."""
    write_report(runs.with_mistakes(tmp_path, names))
    browser.get((tmp_path / "report.html").as_uri())
    until(browser, lambda: one(browser, ".matrix rect.wrong"))
    first = one(browser, "[aria-label=Classes] tbody tr").text
    assert first == f"{names[0]} 90.0% 10 {names[1]} (1) 90.0% 100"
    told = ".confused [aria-label='Most frequent mistakes'] tbody tr"
    assert one(browser, told).text == f"{names[0]} {names[1]} 1 of 10"
    cells = browser.find_elements(By.CSS_SELECTOR, ".matrix .right")
    assert len(cells) == min(100, len(names))
    assert texts(browser, ".pictures figcaption") == [
        f"predicted as {names[-1]} (98.7%)\ntrue class {names[0]}\n/data/{names[0]}",
        names[0],
    ]
    pictures = browser.find_elements(By.CSS_SELECTOR, "main img")
    assert [(each.get_attribute("src") or "")[:23] for each in pictures] == [
        "data:image/jpeg;base64,"
    ] * 2
    assert ("Top-5" in one(browser, ".figures").text) == (len(names) > 5)
    assert browser.get_log("browser") == []


def test_without_a_mistake_there_is_none(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """A network that is always right; a class without images has no figures."""
    classes = {"class": ["cat", "dog", "cow"], "images": [2, 0], "correct": [2, 0], "given": [2, 0]}
    write_report(runs.with_mistakes(tmp_path, ["a"], classes=classes, kinds=[], mistakes=[]))
    browser.get((tmp_path / "report.html").as_uri())
    section = until(browser, lambda: one(browser, ".confused").find_element(By.XPATH, ".."))
    assert section.text.count("None.") == 2 and "0 mistakes in 2 images" in section.text
    assert "undefined" not in section.text and "NaN" not in section.text
    assert texts(browser, "[aria-label=Classes] tbody tr")[1].startswith("dog not available")


def test_a_sweep_is_compared(show: Callable[..., webdriver.Chrome]) -> None:
    """Six rows that sort, absent figures last; a click shows a run, a tick hides its chart."""
    page = show("sweep")
    assert texts(page, ".sweep thead th")[-2:] == ["loader.num_workers", "loader.batch_size"]
    until(page, lambda: len(page.find_elements(By.CSS_SELECTOR, ".multiples svg")) == 6)
    heading = page.find_element(By.XPATH, "//th/button[text()='top-1']")
    for _ in range(2):
        heading.click()
    assert texts(page, ".sweep tbody th") == [
        f"{job}: num_workers={(1, 2, 4)[job % 3]} batch_size={(128, 256)[job // 3]}"
        for job in (4, 3, 2, 1, 0, 5)
    ]
    assert one(page, ".sweep [aria-sort]").get_attribute("aria-sort") == "descending"
    one(page, "tr[data-run='3'] th button").click()
    until(page, lambda: texts(page, ".detail h2")[:1] == ["Run 3"])
    one(page, "tr[data-run='5'] input").click()
    until(page, lambda: len(page.find_elements(By.CSS_SELECTOR, ".multiples svg")) == 5)


def test_what_was_swept_is_shown_as_typed(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """A setting that was swept has a column, also where the loader used another value."""
    for job, asked in enumerate(("true", "false")):
        runs.cpu_run(
            tmp_path / str(job),
            steps=50,
            run={"overrides": [f"loader.pin_memory={asked}"], "name": str(job)},
        )
    write_sweep(tmp_path)
    browser.get((tmp_path / "report.html").as_uri())
    until(
        browser,
        lambda: texts(browser, ".sweep tbody th") == ["0: pin_memory=true", "1: pin_memory=false"],
    )
    assert texts(browser, ".sweep thead th")[-1] == "loader.pin_memory"
    assert texts(browser, ".sweep tbody td:last-child") == ["true (used false)", "false"]


def test_a_chart_is_steered_by_keyboard(show: Callable[..., webdriver.Chrome]) -> None:
    """Tab reaches it, arrows move along it, its words and the tooltip follow, Escape ends it."""
    page = show("cpu_run")
    chart = one(page, ".course svg[role=slider]")
    button = page.find_elements(By.CSS_SELECTOR, "main button, main svg[role=slider]")
    page.execute_script("arguments[0].focus()", button[button.index(chart) - 1])
    page.switch_to.active_element.send_keys(Keys.TAB)
    assert page.switch_to.active_element == chart
    chart.send_keys(Keys.END, Keys.ARROW_LEFT)
    assert (chart.get_attribute("aria-valuetext") or "").startswith(
        "up to step 390, epoch 1, compute "
    )
    assert one(page, ".tip").is_displayed() and "median step" in one(page, ".tip").text
    assert (
        page.execute_script("return getComputedStyle(arguments[0]).outlineStyle", chart) == "solid"
    )
    chart.send_keys(Keys.ESCAPE)
    assert not one(page, ".tip").is_displayed()


def test_the_machines_processors_lie_beside_the_runs_own(
    show: Callable[..., webdriver.Chrome],
) -> None:
    """One chart has a line for each, named in its legend and in its words."""
    charts = {}
    for page in ("cpu_run", "long_run"):
        chart = show(page).find_element(
            By.XPATH, "//h3[text()='CPU cores in use']/ancestor::div[@class='chart']"
        )
        said = (
            chart.find_element(By.CSS_SELECTOR, "svg[role=slider]").get_attribute("aria-label")
            or ""
        )
        lines = chart.find_elements(By.CSS_SELECTOR, "svg[role=slider] .line")
        charts[page] = (
            said.split(": ")[1].split("; "),
            len(lines),
            chart.find_element(By.CSS_SELECTOR, ".keys").text,
        )
    machine = "the whole machine from 31.5 cores to 31.5 cores"
    own = "this run from 1.90 cores to 1.90 cores"
    assert charts["cpu_run"] == ([machine, own], 2, "the whole machine\nthis run")
    assert charts["long_run"][1:] == (1, "this run")


def test_the_numbers_behind_a_chart_are_a_table(show: Callable[..., webdriver.Chrome]) -> None:
    """Opened, it has a row for every group of windows."""
    page = show("cpu_run")
    one(page, ".course summary").click()
    until(page, lambda: len(page.find_elements(By.CSS_SELECTOR, ".course details tbody tr")) == 40)


def test_the_next_step_is_copied(show: Callable[..., webdriver.Chrome]) -> None:
    """The button puts it on the clipboard, or selects it."""
    page = show("cpu_run")
    one(page, ".next button").click()
    said = until(page, lambda: one(page, ".next [role=status]").text)
    assert (
        said == "copied"
        or page.execute_script("return String(getSelection())") == "loader.num_workers=8"
    )


@pytest.mark.parametrize("page", ["long_run", "sweep"])
@pytest.mark.parametrize("width", [1280, 700, 360])
def test_the_page_fits_its_width(
    show: Callable[..., webdriver.Chrome], page: str, width: int
) -> None:
    """Nothing makes the page itself scroll sideways."""
    assert (
        show(page, width=width).execute_script("return document.documentElement.scrollWidth")
        <= width
    )


@contextmanager
def tensorboard(logdir: Path, *flags: str) -> Iterator[str]:
    """The address of a TensorBoard on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(logdir),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *flags,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                try:
                    urlopen(f"http://127.0.0.1:{port}/data/plugins_listing", timeout=WAIT_S).close()
                    break
                except OSError:
                    assert server.poll() is None, "TensorBoard did not start"
                    time.sleep(0.1)  # for a process of its own there is no fake clock
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """A TensorBoard that shows all runs, one of them with an event file."""
    with RunWriter(folder / "long_run", tensorboard=True) as writer:
        for step in (10, 20, 30):
            writer.scalars(step, {"speed/images_per_s": float(step)})
    with tensorboard(folder) as found:
        yield found


def look_at_the_tab(browser: webdriver.Chrome, address: str) -> None:
    """Open the tab, choose the long run and see its spikes."""
    browser.get_log("browser")
    browser.get(f"{address}/#data_stalls")
    browser.switch_to.frame(until(browser, lambda: one(browser, "iframe[src*=data_stalls]")))
    until(browser, lambda: one(browser, "tr[data-run='long_run'] th button")).click()
    until(
        browser,
        lambda: (
            texts(browser, ".detail h2")[:1] == ["Run long_run"]
            and one(browser, ".detail .chart svg")
        ),
    )
    assert len(browser.find_elements(By.CSS_SELECTOR, ".detail .spike")) == 4
    shown = "return [...document.querySelectorAll('.pictures img')].map((one) => one.naturalWidth)"
    until(browser, lambda: browser.execute_script(shown) == [8, 8])


def no_error(browser: webdriver.Chrome) -> bool:
    """Whether the console, on which TensorBoard itself warns, has no error."""
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_tab_shows_the_runs(browser: webdriver.Chrome, address: str) -> None:
    """In a real TensorBoard the tab lists the runs, shows one, follows the theme, reloads."""
    look_at_the_tab(browser, address)
    assert len(texts(browser, "tbody tr[data-run]")) == 10
    shade = "return getComputedStyle(document.body).backgroundColor"
    for step, expected in (("remove", "rgb(255, 255, 255)"), ("add", "rgb(20, 24, 29)")):
        browser.execute_script(f"parent.document.body.classList.{step}('dark-mode')")
        until(browser, lambda expected=expected: browser.execute_script(shade) == expected)
    assert no_error(browser)


LATE_ANSWER = """
    const asked = window.fetch;
    const late = await asked(`${parent.location.origin}/data/plugin/data_stalls/run?name=cpu_run`);
    const body = await late.json();
    window.fetch = (address) => String(address).endsWith("name=cpu_run")
      ? new Promise((answer) => {
          window.release = () => answer({ ok: true, json: async () => body });
        })
      : asked(address);
"""


@pytest.mark.slow
def test_a_late_answer_replaces_no_later_run(browser: webdriver.Chrome, address: str) -> None:
    """The run that was clicked last stays, although the one before it arrives after it."""
    browser.get("about:blank")
    look_at_the_tab(browser, address)
    browser.execute_script(f"return (async () => {{ {LATE_ANSWER} }})()")
    for name in ("cpu_run", "damaged"):
        one(browser, f"tr[data-run='{name}'] th button").click()
    until(browser, lambda: texts(browser, ".detail h2")[:1] == ["Run damaged"])
    browser.execute_script(
        "release(); return new Promise((done) => setTimeout(done))"
    )  # after all that answers set off
    assert texts(browser, ".detail h2")[0] == "Run damaged"
    assert one(browser, "tr[data-open] th").text == "damaged"


@pytest.mark.slow
def test_the_tab_needs_no_fast_loader(browser: webdriver.Chrome, folder: Path) -> None:
    """With TensorBoard's older loader it shows the same."""
    with tensorboard(folder, "--load_fast=false") as found:
        look_at_the_tab(browser, found)
        assert no_error(browser)
        browser.get("about:blank")
