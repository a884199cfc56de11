"""The run's folder: made once, owned by one run, with the log inside it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TextIO

from harness.config import ConfigError, Mode
from harness.runtime.errors import LockedError, described
from harness.runtime.files import open_regular

LOGGER = "wellfed"
# for the folder that the first rank makes
_WAIT = timedelta(seconds=60)

# Open for as long as this process owns the folders.
_owned: dict[Path, ExitStack] = {}

_log = logging.getLogger(LOGGER)


def is_first_rank() -> bool:
    """Whether this process is the first rank of torchrun, or was not started by it."""
    return os.environ.get("RANK", "0") == "0"


def run_folder(name: str | None, resume: str | None = None, mode: Mode = Mode.train) -> str:
    """The folder of a single run, owned by this process before Hydra writes into it; the same for
    all ranks under torchrun.

    A run without a name goes on in the folder that ``resume`` names, and with ``resume=auto`` in
    the one that it had before torchrun restarted it.

    Raises:
        ConfigError: a folder of that name holds a run, and this one does not go on with it.
    """
    outputs = Path("outputs")
    goes_on = resume if mode is Mode.train else None
    if name is None and goes_on not in (None, "auto") and Path(goes_on, "checkpoints").is_dir():
        folder = Path(goes_on)
    elif name is None:
        return shared(
            lambda before: str(own(Path(before) if before else new_folder(outputs))),
            lasting=goes_on == "auto",
        )
    else:
        folder = outputs / name
    if is_first_rank():
        if goes_on is None:
            refuse_used(folder)
        own(folder)
    return str(folder)


def shared(make: Callable[[str | None], str], *, lasting: bool = False) -> str:
    """What ``make`` returned in the first rank, in every rank of torchrun; without torchrun, what
    it returns here.

    It goes through the store that torchrun itself keeps, under a name of its own for each restart
    of the workers. Where it is ``lasting``, ``make`` is given what it returned before the restart,
    else None.

    Raises:
        ConfigError: the first rank could not make it, or torchrun keeps no store.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return make(None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            "run.name=null: this launcher keeps no store to share a folder's name; set run.name"
        )
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_WAIT
    )
    kept = f"wellfed/folder/{run_id}"
    key = f"{kept}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ["RANK"] == "0":
        try:
            made = make(store.get(kept).decode() if lasting and store.check([kept]) else None)
        except Exception as error:
            store.set(key, f"!{error}")
            raise
        if lasting:
            store.set(kept, made)
        store.set(key, f"={made}")
        return made
    said = store.get(key).decode()
    if said.startswith("!"):
        raise ConfigError(said[1:])
    return said[1:]


def sweep_folder(name: str | None) -> str:
    """The folder of a sweep."""
    return str(Path("multirun") / name if name is not None else new_folder(Path("multirun")))


def new_folder(base: Path, now: datetime | None = None) -> Path:
    """A folder ``base/<date>/<time>`` that no other run has, with a suffix where two start in one
    second.
    """
    stamp = (now or datetime.now()).strftime("%Y-%m-%d/%H-%M-%S")
    try:
        (base / stamp).parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            folder = base / (f"{stamp}-{attempt}" if attempt else stamp)
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise _unusable(base / stamp, error) from error
    raise ConfigError(f"run.name=null: a thousand runs have begun in {base / stamp}; set run.name")


def own(folder: Path) -> Path:
    """Make ``folder`` if need be and own it until this process ends; ``folder`` itself.

    The lock is the kernel's (``flock``): it goes with the process, also after SIGKILL, so that no
    stale lock can stay.

    Raises:
        LockedError: another live run owns the folder.
        ConfigError: it cannot be made or written to.
    """
    path = folder.resolve() / ".lock"
    if path in _owned:
        return folder
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise _unusable(folder, error) from error
        handle = held.enter_context(open(lock, "r+", encoding="utf-8"))
        if not _locked(path, handle, held):
            owner = handle.read().strip() or "another process"
            raise LockedError(f"{folder}: in use by {owner}; wait for it or set another run.name")
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        handle.flush()
        _owned[path] = held.pop_all()
    # Of a run that was killed.
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)
    return folder


def _locked(path: Path, handle: TextIO, held: ExitStack) -> bool:
    """Whether the lock at ``path`` could be had; it goes when ``held`` is closed.

    Where the file system has no ``flock``, a socket's name is the lock: the kernel keeps and frees
    the name likewise.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning(
            "%s: no locks here (%s): only runs on this machine are kept out of the folder",
            path,
            error.strerror,
        )
    name = held.enter_context(socket.socket(socket.AF_UNIX))
    try:
        name.bind(f"\0wellfed-{hashlib.sha256(os.fsencode(path)).hexdigest()}")
    except OSError:
        return False
    return True


def refuse_used(folder: Path) -> None:
    """Refuse a folder that holds a run already: a second one would mix with it.

    Raises:
        ConfigError: with the ways out.
    """
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists():
        raise ConfigError(
            f"{os.path.relpath(folder)}: holds a run; go on with resume=auto, or set another "
            "run.name"
        )


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{folder}: cannot be the run's folder: {error.strerror or error}; "
        "start from a folder you may write to, or set hydra.run.dir"
    )


@contextmanager
def logging_failure(folder: Path) -> Iterator[None]:
    """Write the error that ends the block into the log in ``folder``, with its traceback where its
    cause is not known.
    """
    try:
        yield
    except BaseException as error:
        known = described(error)
        text = known[0] if known else "".join(traceback.format_exception(error)).rstrip()
        record = logging.LogRecord(LOGGER, logging.ERROR, "", 0, "%s", (text,), None)
        # it may be the disk that has failed, and the error is told on the console too
        with suppress(OSError), closing(_file(folder, int(os.environ.get("RANK", "0")))) as handler:
            handler.handle(record)
        raise


def _file(folder: Path, rank: int) -> logging.FileHandler:
    """What writes into the log of ``rank``."""
    name = "train.log" if rank == 0 else f"train-rank{rank}.log"
    handler = logging.FileHandler(folder / name, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler


@contextmanager
def logging_to(folder: Path, rank: int = 0) -> Iterator[logging.Logger]:
    """Send the project's log to ``train.log`` in ``folder`` inside the block; other ranks have a
    file each.
    """
    logger = logging.getLogger(LOGGER)
    handler = _file(folder, rank)
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
