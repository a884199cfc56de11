"""Two nodes on one machine: network namespaces with a cable between, and a host name each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
_PORT = 29500


class Nodes:
    """A context manager; what runs on the nodes at its end is killed."""

    def __init__(self) -> None:
        self.names = [f"wellfed{os.getpid()}{letter}" for letter in "ab"]

    @staticmethod
    def missing() -> str:
        """Why there can be none here, if there cannot."""
        if not (shutil.which("ip") and shutil.which("unshare")):
            return "needs ip and unshare"
        name = f"wellfed{os.getpid()}"
        # root may lack the right in a container
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
        if made.returncode:
            return f"needs network namespaces: {made.stderr.decode().strip()}"
        subprocess.run(["ip", "netns", "delete", name], check=True)
        return ""

    def __enter__(self) -> Self:
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.names
        # each has its end under the same name
        _ip(
            "link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second
        )
        for i, name in enumerate(self.names):
            _ip("-n", name, "address", "add", f"10.0.0.{i + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for i, name in enumerate(self.names):
            self.kill(i)
            _ip("netns", "delete", name)

    def kill(self, node: int) -> None:
        """Kills all processes of a node at once."""
        for number in _ip("netns", "pids", self.names[node]).split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)

    def start(self, node: int, folder: Path, *settings: str) -> subprocess.Popen[str]:
        """Starts torchrun with one rank on ``node`` in ``folder``; its output is text."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[node])
        return subprocess.Popen(
            [
                "ip", "netns", "exec", self.names[node], *named,
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                "--rdzv-id=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=10.0.0.1:{_PORT}",
                f"--rdzv-conf=is_host={1 - node}", f"--local-addr=10.0.0.{node + 1}",
                str(ROOT / "train.py"), *settings,
            ],
            cwd=folder,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "cable"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout
