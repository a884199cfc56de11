"""What ranks under torchrun must share before they join: the run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

from harness.config import ConfigError

_WAIT = timedelta(seconds=60)


def shared(make: Callable[[str | None], str], *, lasting: bool = False) -> str:
    """What ``make`` returned in the first rank, in every rank of torchrun; without torchrun, what it returns here.

    It goes through the store that torchrun itself keeps, under a name of its own for each restart of the workers. Where it is
    ``lasting``, ``make`` is given what it returned before the restart, else None.

    Raises:
        ConfigError: the first rank could not make it, or torchrun keeps no store.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return make(None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError("run.name=null: this launcher keeps no store to share a folder's name; set run.name")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_WAIT)
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
