"""A real Slurm with two virtual nodes on this machine, where it is installed and we are root."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

from tests.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
START_SECONDS = 60

CONFIG = """
ClusterName=lab
SlurmctldHost={host}
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=1 RealMemory=2000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF State=UP
"""


def missing():
    """Why no Slurm can be had here; empty: it can."""
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def slurm(folder):
    """Start a cluster of nodes n1 and n2, partitions `low` and `high`; yields the environment for its commands."""
    (folder / "munge").mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = dict(zip(("controller_port", "port1", "port2"), [free_port() for _ in range(3)], strict=True))
    conf = folder / "slurm.conf"
    conf.write_text(CONFIG.format(folder=folder, host=socket.gethostname(), **ports))
    environment = os.environ | {"SLURM_CONF": str(conf)}
    munge = folder / "munge"
    daemons = [["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket"]]
    daemons[0] += [f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
    daemons += [["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    log = open(folder / "daemons.log", "wb")  # noqa: SIM115
    running = []
    try:
        for command in daemons:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if command[0] == "munged":
                _wait(lambda: (munge / "socket").exists(), folder)
        _wait(lambda: _states(environment) == {"idle"}, folder)
        yield environment
        subprocess.run(["scancel", "--user=root"], env=environment)
    finally:
        for daemon in reversed(running):
            daemon.send_signal(signal.SIGTERM)
        for daemon in running:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
        log.close()


def _states(environment):
    command = ["sinfo", "--noheader", "--format=%T", "--partition=low"]
    return set(subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split())


def _wait(ready, folder):
    deadline = time.monotonic() + START_SECONDS
    while not ready():  # type: ignore[operator]
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.1)
