"""The run's folder: made once, owned by one run, with the log inside it."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from harness.config import ConfigError, Mode
from harness.runtime.errors import LockedError, described
from harness.runtime.files import open_regular, read_regular, write_whole

LOGGER = "wellfed"

# open for as long as this process owns the folders
_owned: dict[Path, ExitStack] = {}
# the settings of the run that this one goes on with, which Hydra overwrites
_former: dict[Path, bytes] = {}

_log = logging.getLogger(LOGGER)


def is_first_rank() -> bool:
    """Whether this process is the first rank, also without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def run_folder(name: str | None, resume: str | None = None, mode: Mode = Mode.train) -> str:
    """Returns the folder of a single run, the same for all ranks under torchrun.

    The first rank owns the folder before Hydra writes into it. A run without a name goes on in the
    folder that ``resume`` names, and with ``resume=auto`` in the folder that the run had before
    torchrun restarted it.

    Raises:
        ConfigError: a folder of that name holds a run, and this one does not go on with it.
    """
    outputs = Path("outputs")
    goes_on = None
    if mode is Mode.train:
        goes_on = resume
    if name is None and goes_on not in (None, "auto") and Path(goes_on, "checkpoints").is_dir():
        folder = Path(goes_on)
    elif name is None:

        def make(before: str | None) -> str:
            if before is not None and goes_on == "auto":
                return str(own(Path(before)))
            return str(own(new_folder(outputs)))

        return shared(make)
    else:
        folder = outputs / name
    if is_first_rank():
        if goes_on is None:
            refuse_used(folder)
        own(folder)
        keep_settings(folder)
    return str(folder)


def shared(make: Callable[[str | None], str]) -> str:
    """Returns what ``make`` returned in the first rank of torchrun; without torchrun, here.

    The value goes through the store that torchrun itself keeps, under another key for each restart
    of the workers. ``make`` is given what it returned before a restart, else None.

    Raises:
        ConfigError: the first rank failed, or torchrun keeps no store.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return make(None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            "run.name=null: this launcher keeps no store to share a folder's name; set run.name"
        )
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    kept = f"wellfed/folder/{run_id}"
    key = f"{kept}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if is_first_rank():
        before = None
        if store.check([kept]):
            before = store.get(kept).decode()
        try:
            made = make(before)
        except Exception as error:
            store.set(key, f"!{error}")
            raise
        store.set(kept, made)
        store.set(key, f"={made}")
        return made
    said = store.get(key).decode()
    if said.startswith("!"):
        raise ConfigError(said[1:])
    return said[1:]


def sweep_folder(name: str | None) -> str:
    """Returns the folder of a sweep."""
    if name is None:
        return str(new_folder(Path("multirun")))
    return f"multirun/{name}"


def new_folder(base: Path) -> Path:
    """Returns a new folder ``base/<date>/<time>``, with a suffix if two start in one second."""
    stamp = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    try:
        (base / stamp).parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count():
            folder = base / (f"{stamp}-{attempt}" if attempt else stamp)
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise unusable(base / stamp, error) from error
    return folder


def own(folder: Path) -> Path:
    """Makes ``folder`` and owns it until this process ends; returns ``folder``.

    The lock is the kernel's (``flock``), or on a file system without ``flock`` a socket's name: it
    goes with the process, also after SIGKILL, so that no stale lock can stay.

    Raises:
        LockedError: another live run owns the folder.
        ConfigError: the folder cannot be made or written to.
    """
    path = folder.resolve() / ".lock"
    if path in _owned:
        return folder
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise unusable(folder, error) from error
        handle = held.enter_context(open(lock, "r+", encoding="utf-8"))
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:
                _log.warning(
                    "%s: no locks here (%s): only runs on this machine are kept out of the folder",
                    path,
                    error.strerror,
                )
                name = held.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0wellfed-{hashlib.sha256(os.fsencode(path)).hexdigest()}")
        except OSError:
            owner = handle.read().strip() or "another process"
            raise LockedError(
                f"{folder}: in use by {owner}; wait for it or set another run.name"
            ) from None
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        handle.flush()
        _owned[path] = held.pop_all()
    # of a run that was killed
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)
    return folder


def refuse_used(folder: Path) -> None:
    """Refuses a folder that holds a run already: a second run would mix with the first.

    Raises:
        ConfigError: with the ways out.
    """
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists():
        raise ConfigError(
            f"{os.path.relpath(folder)}: holds a run; go on with resume=auto, or set another "
            "run.name"
        )


def keep_settings(folder: Path) -> None:
    """Remembers the settings and the report of the run in ``folder``, for ``put_settings_back``."""
    _former.clear()
    folder = folder.resolve()
    for path in (folder / "report.json", *folder.glob(".hydra/*.yaml")):
        with suppress(OSError):
            _former[path] = read_regular(path)


def put_settings_back(folder: Path) -> None:
    """Puts back what ``keep_settings`` remembers, unless a run has left another report since."""
    report = folder.resolve() / "report.json"
    now = None
    with suppress(OSError):
        now = read_regular(report)
    if now == _former.pop(report, None):
        for path, content in _former.items():
            with suppress(OSError):
                write_whole(path, content)


def unusable(folder: Path, error: OSError) -> ConfigError:
    """Returns what to say of a folder that cannot be made or written to."""
    return ConfigError(
        f"{folder}: cannot be the run's folder: {error.strerror or error}; "
        "start from a folder you may write to, or set hydra.run.dir"
    )


@contextmanager
def logging_failure(folder: Path) -> Iterator[None]:
    """Opens a block whose error is logged in ``folder``, with the traceback of an unknown cause."""
    try:
        yield
    except BaseException as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        if known := described(error):
            text = known[0]
        rank = int(os.environ.get("RANK", "0"))
        # a logger of its own, for the console tells the error too; the disk may have failed
        with suppress(OSError), logging_to(folder, rank, "failure") as log:
            log.error("%s", text)
        raise


@contextmanager
def logging_to(folder: Path, rank: int = 0, logger_name: str = LOGGER) -> Iterator[logging.Logger]:
    """Opens a block in which the log goes to ``folder``, to one file for each rank."""
    logger = logging.getLogger(logger_name)
    name = f"train-rank{rank}.log" if rank else "train.log"
    handler = logging.FileHandler(folder / name, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    former = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.level, logger.propagate = former
