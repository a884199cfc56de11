"""Reads objects from S3, Google Cloud Storage and Azure with obstore, in the caller's thread."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

from ..config import ConfigError
from ..runtime.errors import DataError

# shorter than loader.timeout_s
_RETRIES = {"retry_timeout": timedelta(seconds=20)}
_CLIENT = {"allow_http": True, "timeout": "10 minutes", "read_timeout": "30 seconds"}


class RemoteStore:
    """The objects below ``root``, an address such as ``s3://BUCKET/FOLDER``.

    Credentials, regions and endpoints come from the environment, where obstore's builders read
    them. Messages never include server URLs, which may be signed.

    Raises:
        ConfigError: ``root`` is not such an address, or has a user name, a password or a query.
        DataError: obstore is not installed.
    """

    def __init__(self, root: str, states: dict[str, tuple[int, str]] | None = None) -> None:
        scheme, _, rest = root.partition("://")
        if re.search(r"[@?#]", rest):
            # not repeated, because it may contain a secret
            raise ConfigError(
                f"data.root={scheme}://...: a user name, password or query would be logged; set "
                "credentials in the environment, such as AWS_ACCESS_KEY_ID"
            )
        self.root = root.rstrip("/")
        # objects that changed after they were listed are rejected
        self._states = states or {}
        self._process = os.getpid()
        try:
            self._obstore: Any = import_module("obstore")
            # the keys depend on the kind of store
            open_url: Any = import_module("obstore.store").from_url
        except ImportError as error:
            raise DataError(
                f"data.root={self.root}: needs obstore; run pip install obstore"
            ) from error
        try:
            self._store = open_url(self.root, client_options=_CLIENT, retry_config=_RETRIES)
        except Exception as error:
            raise ConfigError(
                f"data.root={self.root}: {_plain(error)}; use s3://BUCKET/FOLDER, "
                "gs://BUCKET/FOLDER or az://ACCOUNT/CONTAINER/FOLDER"
            ) from None

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteStore, (self.root, self._states)

    def names(self) -> list[str]:
        """Returns the names of all objects, sorted; raises OSError if they cannot be listed."""
        with self._reporting():
            listed = [each for part in self._obstore.list(self._store) for each in part]
        self._states = {each["path"]: _state(each) for each in listed}
        return sorted(self._states)

    def state(self, name: str) -> tuple[int, str]:
        """Returns the size of a listed object, and its ETag or modification time.

        Raises:
            OSError: there is no such object.
        """
        if name not in self._states:
            raise OSError(f"no object {name}")
        return self._states[name]

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns exactly ``length`` bytes from a listed object.

        Raises:
            OSError: they cannot be read, or the object was replaced after it was listed.
            ConfigError: this process is a fork of the one that opened the store.
        """
        if not length:
            return b""
        with self._reporting():
            wanted = {"range": (offset, offset + length)}
            found = self._obstore.get(self._store, name, options=wanted)
            if _state(found.meta) != self._states[name]:
                raise OSError("was replaced after the run started; restart the run")
            data: bytes = found.bytes().to_bytes()
        if len(data) < length:
            raise OSError(f"ends before byte {offset + length}")
        return data

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Raises obstore's errors as OSError with a one-line reason."""
        if os.getpid() != self._process:
            raise ConfigError(
                "loader.start_method=fork: obstore does not survive a fork; use forkserver, or "
                "loader.backend=threads"
            )
        try:
            yield
        except FileNotFoundError:
            raise OSError("no such object") from None
        except self._obstore.exceptions.BaseError as error:
            raise OSError(_plain(error)) from None


def _state(meta: dict[str, Any]) -> tuple[int, str]:
    return meta["size"], str(meta["e_tag"] or meta["last_modified"])


def _plain(error: Exception) -> str:
    """Returns the reason for the error, without addresses."""
    text = str(error).partition("\n")[0]
    if answered := re.search(r"status code: (\d{3}[\w ]*)", text):
        denied = answered[1].startswith(("400", "401", "403"))
        check = "; check the credentials in the environment" if denied else ""
        return f"the server answered {answered[1].strip()}{check}"
    return re.sub(r"\S+://\S+", "...", text.rpartition(" - ")[2])
