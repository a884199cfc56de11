"""Creates the run folder, locks it for one run and logs to it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import socket
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from ..config import ConfigError, Mode
from .errors import DataError, DiskError, LockedError, RunError, described
from .files import open_regular, write_whole

LOGGER = "wellfed"
# shared by all packages
log = logging.getLogger(LOGGER)

# output files that a second run would overwrite
_LEFT = ("metrics.jsonl", "checkpoints", "predictions.csv", "model.pt2", "model.onnx")

# open while this process owns the folders
_owned: dict[Path, ExitStack] = {}


def is_first_rank() -> bool:
    """Whether this process is the first rank, even without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def unusable(folder: Path, error: OSError) -> ConfigError | DiskError:
    """Returns the error for a folder that cannot be created or written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"{folder}: {error.strerror}; free some disk space")
    return ConfigError(
        f"{folder} cannot be used as the run folder: {error.strerror or error}; start in a folder "
        "that you can write to, or set hydra.run.dir (for a sweep: hydra.sweep.dir)"
    )


@contextmanager
def using(folder: Path) -> Iterator[None]:
    """A block that creates ``folder`` or writes to it.

    Raises:
        ConfigError: the folder cannot be created or written to.
        DiskError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise unusable(folder, error) from error


def run_folder(name: str | None, resume: str | None = None, mode: Mode = Mode.train) -> str:
    """Returns the folder of a single run, shared by all ranks under torchrun.

    A run without a name continues in the folder ``resume`` or, with ``resume=auto``, in the folder
    that it used before torchrun restarted it. The name of a new folder is shared through torchrun's
    store, with a new key for each restart of the workers.

    Raises:
        ConfigError: the folder cannot be created, or torchrun provides no store.
    """
    outputs = Path("outputs")
    trains = mode is Mode.train
    if name is not None:
        return str(outputs / name)
    goes_on = trains and resume not in (None, "auto") and Path(resume, "checkpoints").is_dir()
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    has_store = run_id and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if goes_on and not has_store:
        return str(resume)
    if run_id is None:
        refuse_auto(resume)
        return str(new_folder(outputs))
    if not has_store:
        raise ConfigError(
            "run.name=null: this launcher's ranks cannot agree on a folder; set run.name"
        )
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    kept = f"wellfed/folder/{run_id}"
    key = f"{kept}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if is_first_rank():
        if not (resume == "auto" and trains and store.check([kept])):
            store.set(kept, str(resume if goes_on else new_folder(outputs)))
        store.set(key, store.get(kept).decode())
    return str(store.get(key).decode())


def refuse_auto(resume: str | None) -> None:
    """Rejects ``resume=auto`` for a run that gets a new folder at each start.

    Raises:
        ConfigError: the setting is rejected; the message gives the alternatives.
    """
    if resume == "auto":
        raise ConfigError(
            "resume=auto: a new folder has no checkpoint; set run.name=NAME or resume=FOLDER"
        )


def new_folder(base: Path) -> Path:
    """Returns a new folder ``base/<date>/<time>``, with a suffix if two start within a second."""
    stamp = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    with using(base / stamp):
        for attempt in itertools.count():
            folder = base / (f"{stamp}-{attempt}" if attempt else stamp)
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
    return folder


def check_folder(path: str) -> None:
    """Raises DataError if ``data.root`` is not a folder."""
    if not os.path.isdir(path):
        raise DataError(
            f"data.root={path}: no such folder; set it to the folder that contains the dataset"
        )


def own(folder: Path) -> Path:
    """Creates ``folder`` and owns it until this process ends; returns ``folder``.

    The kernel releases the lock (``flock``, or a socket name if unsupported) with the process, even
    after SIGKILL, so locks are never stale.

    Raises:
        LockedError: another live run owns the folder.
        ConfigError: the folder cannot be created or written to.
        DiskError: the disk is full.
    """
    path = folder.resolve() / ".lock"
    if path in _owned:
        return folder
    with ExitStack() as held:
        with using(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        handle = held.enter_context(open(lock, "r+", encoding="utf-8"))
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:
                text = (
                    "%s does not support file locks (%s), so only other runs on this machine are "
                    "prevented from using the folder"
                )
                log.warning(text, path, error.strerror)
                name = held.enter_context(socket.socket(socket.AF_UNIX))
                name.bind(f"\0wellfed-{hashlib.sha256(os.fsencode(path)).hexdigest()}")
        except OSError:
            owner = handle.read().strip() or "another process"
            raise LockedError(
                f"{folder} is in use by {owner}; wait for it to finish or set a different run.name"
            ) from None
        handle.truncate(0)
        print(f"process {os.getpid()} on {os.uname().nodename}", file=handle, flush=True)
        _owned[path] = held.pop_all()
    # left by a killed run
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)
    return folder


def release(folder: Path) -> None:
    """Releases ``folder``, which this process owns."""
    _owned.pop(folder.resolve() / ".lock").close()


def discard(folder: Path) -> None:
    """Removes ``folder`` if a rejected run left only its settings and its log there."""
    with suppress(OSError):
        if {*os.listdir(folder)} <= {".hydra", ".lock", "train.log"}:
            shutil.rmtree(folder)
            # the day's folder
            folder.parent.rmdir()


def refuse_used(folder: Path, trains: bool = True) -> None:
    """Rejects a folder that already contains a run, because a second run's files would mix with it.

    Raises:
        ConfigError: the folder is rejected; the message gives the alternatives.
    """
    if any((folder / name).exists() for name in _LEFT):
        raise ConfigError(
            f"{os.path.relpath(folder)} contains a run; "
            f"{'continue with resume=auto, or ' * trains}set a different run.name"
        )


def write_settings(folder: Path, settings: Mapping[str, str]) -> None:
    """Writes ``.hydra/`` for the run in ``folder``; ``settings`` contains its files by name.

    Hydra would write them before any check, overwriting those of an existing run.

    Raises:
        ConfigError: the folder cannot be written to.
        DiskError: the disk is full.
    """
    place = folder / ".hydra"
    with using(folder):
        if place.is_symlink():
            # it may link to another run's folder
            place.unlink()
        place.mkdir(exist_ok=True)
        for name, text in settings.items():
            write_whole(place / name, text.encode())


@contextmanager
def logging_failure(folder: Path) -> Iterator[None]:
    """A block whose error is logged in ``folder``, with a traceback if unexpected."""
    try:
        yield
    except BaseException as error:
        known = described(error)
        text = known[0] if known else "".join(traceback.format_exception(error)).rstrip()
        rank = int(os.environ.get("RANK", "0"))
        # a separate logger, because the console also prints the error; the disk may have failed
        with suppress(OSError, RunError, ConfigError), logging_to(folder, rank, "failure") as kept:
            kept.error("%s", text)
        raise


@contextmanager
def logging_to(folder: Path, rank: int = 0, logger_name: str = LOGGER) -> Iterator[logging.Logger]:
    """A block that logs to ``folder``, one file per rank.

    Raises:
        ConfigError: the file cannot be written to.
        DiskError: the disk is full.
    """
    logger = logging.getLogger(logger_name)
    name = f"train-rank{rank}.log" if rank else "train.log"
    with using(folder):
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        os.close(open_regular(folder / name, flags, makes_way=True))
        handler = logging.FileHandler(folder / name, encoding="utf-8")
    # on a full disk, lines are lost without a traceback; the console also shows them
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    former = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()
        logger.setLevel(former[0])
        logger.propagate = former[1]
