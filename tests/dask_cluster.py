"""A Dask cluster of processes on this machine, which may be killed."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[1]
# A worker that is to run FUNCTION removes the file kill-FUNCTION, if there is one, and kills itself.
TRAPS = """
import os
from data.prepare import passes, writer
def set_trap(module, name):
    real = getattr(module, name)
    def trapped(*arguments):
        try:
            os.remove('kill-' + name)
        except FileNotFoundError:
            return real(*arguments)
        os.kill(os.getpid(), 9)
    setattr(module, name, trapped)
set_trap(passes, '_write_part')
set_trap(writer, 'write_shard')
"""


class Cluster(ExitStack):
    """A scheduler and workers, each a process, which end with it."""

    def __init__(self, folder, environment):
        super().__init__()
        self.folder = folder
        self.environment = os.environ | environment | {"PYTHONPATH": str(ROOT)}
        self.address = f"tcp://127.0.0.1:{free_port()}"
        (folder / "traps.py").write_text(TRAPS)
        self.scheduler = self.start("scheduler", f"--host={self.address}")

    def start(self, *words):
        command = [sys.executable, "-m", "dask", *words, "--no-dashboard"]
        process = subprocess.Popen(command, env=self.environment, cwd=self.folder, stderr=subprocess.DEVNULL)
        self.callback(process.wait)
        self.callback(process.kill)
        return process

    def add_workers(self, count):
        words = ("worker", self.address, "--no-nanny", "--nthreads=1", "--preload=traps.py")
        return [self.start(*words) for _ in range(count)]
