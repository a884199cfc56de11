"""A Slurm of one node on the loopback address, without munge and without accounts."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/clusters.md"
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
# a job's number chooses its port
FirstJobId={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 MaxTime=INFINITE
PartitionName=high Nodes={host} PriorityTier=10 MaxTime=INFINITE
"""


def script(each_task: bool = False) -> str:
    """The script of docs/how-to/clusters.md, with one task a node or ``each_task`` a rank."""
    whole, tasks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[:2]
    if each_task:
        whole = re.sub(r"srun .*?&\n", lambda _: tasks, whole, count=1, flags=re.S)
    return str(whole)


def until(found: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Waits until ``found`` is true.

    Raises:
        TimeoutError: it is not, within so many seconds.
    """
    until_s = time.monotonic() + seconds
    while not found():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)


class Slurm:
    """The daemons of a cluster; a context manager that cancels its jobs and ends them.

    Args:
        base: an empty folder, for its files; jobs are submitted in ``base/work``.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.work = base / "work"
        for name in ("state", "spool", "work"):
            (base / name).mkdir()
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        host = socket.gethostname().split(".")[0]
        conf = base / "slurm.conf"
        conf.write_text(_CONF.format(host=host, ports=ports, base=base, cpus=os.cpu_count()))
        self._environ = {
            **os.environ,
            "SLURM_CONF": str(conf),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def missing() -> str:
        """Why there can be none here, if there cannot."""
        if os.geteuid():
            return "slurmd must be root"
        return "" if shutil.which("slurmctld") else "needs slurmctld: apt-get install slurm-wlm"

    def __enter__(self) -> Self:
        for name in ("slurmctld", "slurmd"):
            with open(self.base / f"{name}.log", "wb") as said:
                self._daemons.append(
                    subprocess.Popen(
                        [str(shutil.which(name)), "-D"],
                        env=self._environ,
                        stdout=said,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), "an idle node")
        return self

    def __exit__(self, *_: object) -> None:
        jobs = self.ask("squeue", "-h", "-o", "%A").split()
        if jobs:
            self.ask("scancel", "--signal=KILL", "--full", *jobs)
            self.ask("scancel", *jobs)
            until(lambda: not self.ask("squeue", "-h", "-o", "%A").split(), "an empty queue")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(20)

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(
            command,
            cwd=self.work,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        ).stdout

    def submit(self, text: str, *settings: str, options: tuple[str, ...] = ()) -> str:
        """The ID of a new job that runs the script ``text``."""
        (self.work / "train.sbatch").write_text(text)
        said = self.ask("sbatch", "--parsable", *options, "train.sbatch", *settings)
        if not said.strip().isdecimal():
            raise RuntimeError(f"sbatch: {said!r}")
        return said.strip()

    def fact(self, job: str, name: str) -> str:
        """What ``scontrol show job`` says, such as ``JobState``."""
        found = re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def said(self, job: str) -> str:
        """What the job has printed, in all of its lives."""
        path = self.work / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def preempt(self) -> None:
        """Has a job of a partition that goes first take the node for a moment."""
        text = "#!/bin/bash\nsleep 0.1\n"
        job = self.submit(text, options=("--partition=high", "--output=/dev/null"))
        until(lambda: self.fact(job, "JobState") in ("COMPLETED", ""), "the other job's end")

    def start_again(self, job: str, restarts: int) -> None:
        """Waits until a job has been requeued ``restarts`` times, and starts it."""
        until(
            lambda: (
                self.fact(job, "Restarts") == str(restarts)
                and self.fact(job, "JobState") == "PENDING"
            ),
            f"restart {restarts} of {job}",
            90,
        )
        # slurmd refuses a job within the second in which it ended
        time.sleep(2)
        self.change(job, "StartTime=now")
        until(lambda: self.fact(job, "JobState") == "RUNNING", f"life {restarts} of {job}")

    def change(self, job: str, setting: str) -> None:
        """Changes a setting of a job, such as ``TimeLimit=1`` (minutes)."""
        self.ask("scontrol", "update", f"JobId={job}", setting)

    def end(self, job: str, seconds: float = 120.0) -> str:
        """The state in which the job has ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.fact(job, "JobState") in over, f"the end of job {job}", seconds)
        return self.fact(job, "JobState")
