"""Pods of launch/kubernetes as containers on this machine: podman in place of a cluster's nodes, where we are root."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STORE = Path(os.environ.get("TEST_CONTAINERS", ROOT / ".cache" / "containers"))
WHERE = [f"--root={STORE}/store", f"--runroot={STORE}/runroot"]
PODMAN = ["podman", *WHERE]
CONFIG = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
PROGRAMS = ("buildah", "podman", "runc", "debootstrap", "catatonit", "ip")
FOLDER = ROOT / "launch" / "kubernetes"
BASE = re.findall(r"^FROM (\S+)", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)[0]
IMAGE = "localhost/titanite:latest"
BRIDGE = "titanite-test"
GATEWAY = "10.231.77.1"  # this machine, as pods see it
USER = "12345:0"  # as OpenShift chooses one: any user, of group 0


def missing() -> str:
    """Why no pods can run here; empty: they can."""
    places = f"{os.environ['PATH']}:/usr/libexec/podman"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=places)]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: apt-get install {' '.join(PROGRAMS)})"
    return "" if os.geteuid() == 0 else "containers with networks of their own need root"


def call(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def configure() -> None:
    """For podman on machines without systemd, and with limits of which a container may have no more."""
    STORE.mkdir(parents=True, exist_ok=True)
    (STORE / "containers.conf").write_text(CONFIG)
    os.environ["CONTAINERS_CONF"] = str(STORE / "containers.conf")


def build_image(folder: Path) -> None:
    """Build the image of this checkout, on Debian in place of the base that a registry would give."""
    if subprocess.run([*PODMAN, "image", "exists", BASE]).returncode:
        packages = "--include=python3,python3-venv,ca-certificates"
        call("debootstrap", "--variant=minbase", packages, "bookworm", folder / "base")
        (folder / "base" / "usr" / "bin" / "python").symlink_to("python3")
        call("tar", "-C", folder / "base", "-cf", folder / "base.tar", ".")
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        call(*PODMAN, "import", f"--change={path}", folder / "base.tar", BASE)
    mounts = [f"--volume={source}:{target}:ro" for source, target in _settings_of_pip(folder).items()]
    options = ["--isolation=chroot", "--network=host", "--pull-never", "--layers"]
    call("buildah", *WHERE, "bud", *options, *mounts, "-f", FOLDER / "Dockerfile", "-t", IMAGE, ".")


def _settings_of_pip(folder: Path) -> dict[str, str]:
    """What this machine's pip uses, as files and folders to mount: place here → place there."""
    found = re.findall(r"^\S+\.(\S+)='(.*)'$", call(sys.executable, "-m", "pip", "config", "list"), re.MULTILINE)
    lines = ["[global]", *(f"{name} = {value}" for name, value in dict(found).items())]
    (folder / "pip.conf").write_text("\n".join(lines))
    mounts = {str(folder / "pip.conf"): "/etc/pip.conf"}
    for _, value in found:
        for word in value.split():
            place = Path(word.removeprefix("file://"))
            if word.startswith("file://"):
                place = place.parent  # of an index, beside which its files lie
            if place.is_absolute() and place.exists():
                mounts[str(place)] = str(place)
    return mounts


@contextmanager
def network(nodes: list[list[str]], file: Path) -> Iterator[None]:
    """A namespace for each node, joined by a bridge, and a file that says where pods of these names are."""
    lines = ["127.0.0.1 localhost"]
    with ExitStack() as stack:
        call("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(call, "ip", "link", "del", BRIDGE)
        call("ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        call("ip", "link", "set", BRIDGE, "up")
        for number, names in enumerate(nodes):
            node, address = f"titanite-{number}", f"{GATEWAY}{number}"
            lines.append(" ".join([address, *names]))
            call("ip", "netns", "add", node)
            stack.callback(call, "ip", "netns", "del", node)
            call("ip", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", node)
            call("ip", "link", "set", node, "master", BRIDGE, "up")
            call("ip", "-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                call("ip", "-n", node, "link", "set", device, "up")
        file.write_text("\n".join(lines) + "\n")
        yield


class Pod:
    """A container as the kubelet would run it: the pod's spec with the `environment` that its operator adds."""

    def __init__(
        self, name: str, node: int, spec: dict[str, Any], environment: dict[str, str], volumes: dict[str, Path]
    ):
        """`volumes`: a folder of this machine for each volume that is not in memory, and the file of `network`."""
        (container,) = spec["containers"]
        self.name = name
        self.grace_seconds = spec["terminationGracePeriodSeconds"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        words = [
            "run",
            "--rm",
            f"--name={name}",
            f"--hostname={name}",
            f"--network=ns:/run/netns/titanite-{node}",
            "--no-hosts",
        ]
        words += ["--read-only", "--read-only-tmpfs=false", f"--user={USER}", "--security-opt=no-new-privileges"]
        words += [f"--cap-drop={kind}" for kind in security["capabilities"]["drop"]]
        words.append(f"--volume={volumes['hosts']}:/etc/hosts:ro")
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in spec["volumes"]:
            target = places[volume["name"]]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                words.append(f"--tmpfs={target}:rw,mode=1777,size=1g")
            else:
                words.append(f"--volume={volumes[volume['name']]}:{target}")
        words += [f"--env={key}={value}" for key, value in environment.items()]
        expanded = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in container["args"]]
        (program,) = container["command"]
        self.command = [*PODMAN, *words, f"--entrypoint={program}", IMAGE, *expanded]

    def start(self, log: Path) -> None:
        self.log = log
        with open(log, "a") as file:
            self.process = subprocess.Popen(self.command, stdout=file, stderr=file)

    def is_running(self) -> bool:
        return call(*PODMAN, "ps", "--quiet", "--filter", f"name={self.name}") != ""

    def kill(self) -> None:
        """As where its machine is gone."""
        call(*PODMAN, "kill", "--signal=KILL", self.name)

    def evict(self) -> int:
        """SIGTERM, and SIGKILL after the grace period. Returns the exit code."""
        if self.process.poll() is None:
            subprocess.run([*PODMAN, "stop", f"--time={self.grace_seconds}", self.name], capture_output=True)
        return self.process.wait()
