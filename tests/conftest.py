"""What many tests need."""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported: its threads would spin for work, on cores that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# nohup or a shell's background may have had them ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import numpy as np
import pytest
import torch
from generic import GenericCuda
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from samples import start_server

from harness import config as schema
from harness.cli.compose import register
from harness.config import Config
from harness.monitor.host import Neighbors
from harness.runtime import accelerator, signals
from harness.training.checkpoint_write import StopAgreement
from tests.fakecuda import items as fakecuda

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Knows ``--rewrite-golden``, and the setting of pytest-timeout where that is missing.

    A bare machine with a GPU may have pytest alone.
    """
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden anew")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds of a test; needs pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Knows its mark there too."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: needs pytest-timeout")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Has tests of CUDA run on the made-up runtime, or skipped, where there is no GPU.

    Lets torch's warnings pass there: which ones come depends on the card, the driver and torch's
    version.
    """
    for item in items:
        if item.get_closest_marker("cuda_order") or item.get_closest_marker("cuda_values"):
            item.add_marker(
                pytest.mark.filterwarnings("default::UserWarning", "error::pytest.PytestWarning")
            )
    fakecuda.place(config, items)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Starts the fork server with what workers import, before a test starts a lesser one."""
    start_server()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps generated data and remembered answers of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WELLFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process live on when the grace of a signal is over."""
    monkeypatch.setattr(signals, "_guard", lambda reader, own: None)


@pytest.fixture(autouse=True)
def no_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tuning and diagnosis see no other programs on this machine."""
    monkeypatch.setattr(Neighbors, "look", lambda self: None)


@pytest.fixture(scope="session")
def composed() -> Iterator[Callable[..., Config]]:
    """Composes overrides, as the command line does, into a checked config."""
    register()
    for name in ("wellfed.run_dir", "wellfed.sweep_dir"):
        OmegaConf.register_new_resolver(name, lambda *_: "never used", replace=True)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield lambda *overrides: schema.load(compose("config", overrides=list(overrides)))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file of ``tests/golden``; ``--rewrite-golden`` writes the file."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def kept_globals() -> Iterator[None]:
    """Puts torch's thread count and all random states back after a run in this process."""
    threads = torch.get_num_threads()
    python = random.getstate()
    numpy = np.random.get_state()
    generator = torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(generator)


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets the step after which SIGTERM is heard; None: never."""
    ask = StopAgreement.ask
    at = [-1]

    def heard(self: StopAgreement, step: int) -> tuple[int, bool]:
        return (15, False) if step == at[0] else ask(self, step)

    monkeypatch.setattr(StopAgreement, "ask", heard)
    return lambda step: at.__setitem__(0, -1 if step is None else step)


@pytest.fixture(params=["cuda", pytest.param("generic", marks=pytest.mark.slow)])
def cuda_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has CUDA served by its own class, and by the one for devices of any type."""
    if request.param == "generic":
        monkeypatch.setattr(accelerator, "Cuda", GenericCuda)


@pytest.fixture
def one_thread(kept_globals: None) -> None:
    """Leaves torch one thread, for images and networks that are tiny."""
    torch.set_num_threads(1)


@pytest.fixture
def write_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Writes a module into the current folder, as a user does, and forgets it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written: set[str] = set()

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        written.add(name)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()

    yield write
    for name in written:
        sys.modules.pop(name, None)
