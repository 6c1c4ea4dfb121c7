"""Made-up histories of saves, deaths, damage and listings that lag, against a simple model of checkpoints.

HISTORIES=5000 python -m pytest tests/unit/test_checkpoint_protocol.py

The managers are the real ones, one for each of one to three ranks. Stores, clock, threads and the group of the ranks
are doubles: what is in a place is known, any operation can fail or be the last one of its rank, ranks take turns that
chance decides, and a history runs the same way every time.
"""

import json
import os
import pickle
import random
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import manager, names, retention, storage
from checkpoint.manager import CheckpointManager
from checkpoint.ranks import Ranks
from checkpoint.state import allocate_optimizer_state
from checkpoint.stores import CheckpointError, DamagedError, LocalStore
from config import Checkpoint, Config, Training

HISTORIES = int(os.environ.get("HISTORIES", "0"))  # 0: the same few each time
TIMEOUT_SECONDS, VISIBILITY_SECONDS = 60, 10.0
OLD_SECONDS = 2 * TIMEOUT_SECONDS  # from then on what was never committed is a leftover
LAST_STEP = 100  # further than saves alone get
FIRST, SECOND, GROUP = "first", "second", "group"  # places, and where ranks meet
WEIGHTS = 3


class Death(BaseException):
    """The process was killed: whatever it still does reaches no store."""


class Hang(BaseException):
    """A rank waits for what never comes."""


class ConnectionLost(RuntimeError):
    """What gloo raises where another rank has gone."""


# ---------------------------------------------------------------- ranks


class Turns:
    """Ranks as threads of which one runs at a time, in an order that chance decides."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.chance, self.running, self.is_hung = chance, 0, False
        self.size = size
        self.locks: list[threading.Semaphore] = []
        self.ready: dict[int, Callable[[], bool]] = {}  # of the ranks that have not ended: whether one can go on
        self.sent: dict[tuple[int, int, int], bytes] = {}  # (number of the collective, from, to)
        self.kinds: list[str] = []  # of the collectives so far
        self.joined = [0] * size  # of which each rank has begun as many
        self.is_broken = False  # a rank has died or lost its connection: the others may, too

    def run(self, work: Callable[[int], Any]) -> list[tuple[Any, BaseException | None]]:
        """What `work` returns or raises on every rank."""
        results: list[tuple[Any, BaseException | None]] = [(None, None)] * self.size
        self.locks = [threading.Semaphore(0) for _ in range(self.size)]
        self.ready = dict.fromkeys(range(self.size), lambda: True)

        def begin(rank: int) -> None:
            self.locks[rank].acquire()
            try:
                results[rank] = work(rank), None
            except BaseException as error:
                results[rank] = None, error
            del self.ready[rank]
            self._pass_on()

        threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        return results

    def _pass_on(self) -> None:
        able = [rank for rank, ready in self.ready.items() if ready()]
        if not able and self.ready:
            self.is_hung = True
            able = list(self.ready)
        if able:
            self.running = self.chance.choice(able)
            self.locks[self.running].release()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others have their turn, until `ready`."""
        own = self.running
        if own not in self.ready:
            return
        self.ready[own] = ready
        self._pass_on()
        self.locks[own].acquire()
        if self.is_hung:
            raise Hang(f"rank {own} waits in {self.kinds[self.joined[own] - 1]}, number {self.joined[own]}")

    def exchange(self, kind: str, senders: Sequence[int], values: dict[int, Any]) -> list[Any]:
        """Send `values`, by receiver, and receive from `senders`."""
        own, number = self.running, self.joined[self.running]
        self.joined[own] += 1
        self.kinds += [kind] if number == len(self.kinds) else []
        if self.kinds[number] != kind:
            raise Hang(f"rank {own} is in {kind}, others are in {self.kinds[number]}")
        self._may_break()
        for rank, value in values.items():
            self.sent[number, own, rank] = pickle.dumps(value)
        return [self._receive(number, sender, own) for sender in senders]

    def _receive(self, number: int, sender: int, own: int) -> Any:
        key = number, sender, own
        if sender != own:
            self.wait(lambda: key in self.sent or sender not in self.ready)
            self._may_break()
        if key not in self.sent:
            if self.is_broken:
                raise ConnectionLost("connection closed by peer")
            raise Hang(f"rank {own} waits in {self.kinds[number]}, number {number}, for rank {sender}, which has ended")
        return pickle.loads(self.sent[key])

    def _may_break(self) -> None:
        if self.is_broken and self.chance.random() < 0.3:
            raise ConnectionLost("connection closed by peer")


@dataclass(frozen=True)
class Member(Ranks):
    """A rank of several."""

    world: Any = None

    def _exchange(self, kind: str, senders: Sequence[int], values: dict[int, Any]) -> list[Any]:
        with self.world.operation(GROUP):
            return self.world.turns.exchange(kind, senders, values)

    def broadcast(self, value: Any) -> Any:
        if self.rank:
            return self._exchange("broadcast", [0], {})[0]
        self._exchange("broadcast", [], dict.fromkeys(range(1, self.size), value))
        return value

    def gather(self, value: Any) -> list[Any]:
        return self._exchange("gather", [] if self.rank else range(self.size), {0: value})

    def scatter(self, values: Sequence[Any]) -> Any:
        return self._exchange("scatter", [0], dict(enumerate(values)) if self.rank == 0 else {})[0]


# ---------------------------------------------------------------- what the histories happen to


@dataclass
class Object:
    """A file of a place."""

    data: bytes
    written: float  # by the clock
    removed: float | None = None


@dataclass
class Place:
    """What is truly in a store, and how late its listings are."""

    url: str
    world: "World"
    is_disk: bool
    objects: dict[str, Object] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)  # checkpoints that a history has damaged
    stuck: set[str] = field(default_factory=set)  # files that cannot be removed
    late: str = ""  # the end of the names that are listed late
    late_seconds: float = 0
    late_ranks: Sequence[int] = ()  # for which they are late
    is_away: bool = False

    def seen(self, name: str, rank: int, at_most_seconds: float = 1e9) -> bool:
        """Whether an object is shown to a rank by now."""
        object_, now = self.objects[name], self.world.now
        is_late = rank in self.late_ranks and name.endswith(self.late)
        lag = min(self.late_seconds, at_most_seconds) if is_late else 0
        return now >= object_.written + lag and (object_.removed is None or now < object_.removed + lag)

    def there(self, checkpoint: str = "") -> set[str]:
        """What is there in truth, of all or of one checkpoint."""
        return {
            name
            for name, object_ in self.objects.items()
            if object_.removed is None and name.startswith(f"{checkpoint}/" if checkpoint else "")
        }

    @property
    def disks(self) -> list["Place"]:
        """This one alone, or those of all nodes, rank 0's first."""
        return self.world.disks[self.url]

    def parts(self, checkpoint: str) -> list[tuple["Place", str]]:
        """The files of a checkpoint on the disks of all nodes."""
        return [(disk, name) for disk in self.disks for name in sorted(disk.there(checkpoint))]

    def committed(self, kind: str = "step") -> set[str]:
        names = self.disks[0].there()
        return {name.partition("/")[0] for name in names if name.endswith("/MANIFEST.json") and kind in name}

    def begun(self) -> set[str]:
        """Checkpoints of which something is here, but which are not committed."""
        return {name.partition("/")[0] for name in self.there() if "/" in name} - self.committed("")

    def intact(self, kind: str = "step") -> set[str]:
        return self.committed(kind) - self.damaged

    def listed(self) -> set[str]:
        """Checkpoints whose manifest a listing shows to rank 0."""
        manifests = [name for name in self.objects if name.endswith("/MANIFEST.json")]
        return {name.partition("/")[0] for name in manifests if self.seen(name, 0)}

    # ---- changes, each of which leaves every committed checkpoint whole

    def write(self, name: str, data: bytes) -> None:
        checkpoint, _, file = name.rpartition("/")
        if checkpoint in self.committed(""):
            assert self.objects[name].data == data or checkpoint in self.damaged, f"{name} is written over"
        self.objects[name] = Object(data, self.world.now)
        if file == "MANIFEST.json":
            self.damaged.discard(checkpoint)
            self.world.note_commit(self, checkpoint, json.loads(data)["manifest"])
        self.check_whole()

    def remove(self, name: str) -> None:
        checkpoint, _, file = name.rpartition("/")
        if file == "MANIFEST.json" and self is self.disks[0] and checkpoint in self.committed():
            self.world.check_may_go(self, checkpoint)
        elif file == "MANIFEST.json" and self is not self.disks[0] and checkpoint not in self.damaged:
            known = set().union(*(place.committed() for place in self.world.places.values()))
            assert max(known, default="") >= checkpoint, f"{checkpoint} goes, which was committed when rank 0 was here"
        self.objects[name].removed = self.world.now
        self.check_whole()

    def check_whole(self) -> None:
        there = set().union(*(disk.there() for disk in self.disks))
        for checkpoint in self.committed("") - self.damaged:
            lacking = {f"{checkpoint}/{file}" for file in self.world.saves[checkpoint].files} - there
            assert not lacking, f"{self.url}: committed without {lacking}"


class Bucket:
    """The Store protocol over a place as object storage keeps it."""

    read_threads = 2

    def __init__(self, place: Place) -> None:
        self.place, self.world, self.url = place, place.world, place.url

    def sizes(self, prefix: str = "") -> dict[str, int]:
        with self.world.operation(self.place):
            objects = self.place.objects
            return {
                name: len(objects[name].data)
                for name in sorted(objects)
                if self.place.seen(name, self.world.turns.running) and name.startswith(f"{prefix}/" if prefix else "")
            }

    def folders(self) -> set[str]:
        return {name.partition("/")[0] for name in self.sizes() if "/" in name}

    def _data(self, name: str) -> bytes:
        with self.world.operation(self.place) as flip:
            for _ in range(2):  # at first, and at the end of the wait
                rank = self.world.turns.running
                if name in self.place.objects and self.place.seen(name, rank, VISIBILITY_SECONDS / 2):
                    data = self.place.objects[name].data
                    return bytes([data[0] ^ 1]) + data[1:] if flip and data else data
                self.world.now += 0 if self.place.is_disk else VISIBILITY_SECONDS
        raise DamagedError(f"{self.url}/{name}: missing")

    def read(self, name: str) -> bytes:
        return self._data(name)

    def read_into(self, name: str, offset: int, view: memoryview, alone: bool = False) -> None:
        data = self._data(name)[offset : offset + len(view)]
        if len(data) < len(view):
            raise DamagedError(f"{self.url}/{name}: ends too early")
        view[:] = data

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        written: list[bytes] = []
        yield SimpleNamespace(write=lambda data: written.append(bytes(data)))
        self.put(name, b"".join(written))

    def put(self, name: str, data: bytes) -> None:
        with self.world.operation(self.place):
            self.place.write(name, data)

    def remove(self, names: list[str]) -> None:
        self._remove(names[0])
        failures = []
        for name in names[1:]:  # all are tried, by threads
            try:
                self._remove(name)
            except CheckpointError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _remove(self, name: str) -> None:
        with self.world.operation(self.place):
            keeps_all = self.world.fault and self.world.fault.kind == "keeps all"
            if keeps_all or name in self.place.stuck:
                raise CheckpointError(f"{name}: cannot be removed, on purpose")
            if name in self.place.there():
                self.place.remove(name)

    def abort_uploads(self, older_than_seconds: float) -> None:
        with self.world.operation(self.place):
            pass


class Disk(Bucket, LocalStore):
    """The same as a file system keeps it: files are there from their beginning, and are begun but once."""

    read_threads = 1

    def __init__(self, place: Place) -> None:
        Bucket.__init__(self, place)
        self.folder = Path("/nonexistent") / place.url

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        written: list[bytes] = []
        with self.world.operation(self.place):
            if name in self.place.there():
                raise CheckpointError(f"{name}: File exists")
            self.place.write(name, b"")
        try:
            yield SimpleNamespace(write=lambda data: written.append(bytes(data)))
            with self.world.operation(self.place):
                self.place.objects[name].data = b"".join(written)
        except Exception:
            self.place.remove(name)
            raise

    def put(self, name: str, data: bytes) -> None:
        with self.create(f"{name}.tmp") as stream:
            stream.write(data)
        with self.world.operation(self.place):
            self.place.write(name, data)
            self.place.remove(f"{name}.tmp")

    def remove(self, names: list[str]) -> None:
        for name in names:
            self._remove(name)

    def has(self, name: str) -> bool:
        with self.world.operation(self.place):
            return name in self.place.there()

    def probes(self) -> list[str]:
        return []

    def remove_empty(self, names: Collection[str]) -> None:
        pass  # there are no folders here, only names

    def touch(self, name: str) -> None:
        with self.world.operation(self.place):
            self.place.objects[name] = Object(b"", self.world.now)

    def free_bytes(self) -> int:
        with self.world.operation(self.place):
            return 0 if self.world.is_tight and self.place.begun() else 1 << 30


class Process:
    """A rank of a training run that has some weights, or all; besides them it saves its random state and one number."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank, self.samples, self.random_state = world, rank, 0, 0
        names = world.weights_of(rank)
        self.model = torch.nn.ParameterDict({name: torch.zeros(1) for name in names})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.checkpoint = CheckpointManager(
            world.config, world.run_folder, [self.model], self.optimizer, dataloader=self, identity={}
        )

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def fill(self, value: int) -> None:
        allocate_optimizer_state(self.optimizer)
        self.samples, self.random_state = value, value + self.rank
        with torch.no_grad():
            for name, weight in self.model.items():
                weight.fill_(value + int(name) / 8)
                self.optimizer.state[weight]["momentum_buffer"].fill_(-value - int(name) / 8)

    def check_filled(self, value: int, random_value: int) -> None:
        assert (self.samples, self.random_state) == (value, random_value + self.rank)
        for name, weight in self.model.items():
            held = weight.item(), -self.optimizer.state[weight]["momentum_buffer"].item()
            assert held == (value + int(name) / 8,) * 2


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Fault:
    """What happens at one operation of an action in one place."""

    url: str
    number: int  # of the rank's operation there; none counts where nothing can be removed
    kind: str
    rank: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed at some time."""

    step: int
    value: int
    ranks: int
    files: dict[str, bytes]


class World:
    """Places, clock and processes, and what must be true of them."""

    def __init__(
        self,
        run_folder: Path,
        first: str,
        second: str,
        is_tight: bool,
        size: int,
        per_node: int,
        is_sharded: bool,
        seed: int,
        **chosen: Any,
    ) -> None:
        self.now, self.run_folder, self.is_tight = 1.7e9, run_folder, is_tight
        self.size, self.per_node, self.is_sharded, self.chance = size, per_node, is_sharded, random.Random(seed)
        self.disks: dict[str, list[Place]] = {}  # by url; one, or one of each node with that of rank 0 first
        second = "bucket" if first == "nodes" and not second else second  # without one such a run is refused
        for url, kind in ((FIRST, first), (SECOND, second)):
            if kind:
                self.disks[url] = [Place(url, self, kind != "bucket") for _ in range(3 if kind == "nodes" else 1)]
                for disk in self.disks[url]:
                    disk.damaged = self.disks[url][0].damaged
        self.config = Config(
            training=Training(steps=LAST_STEP),
            checkpoint=Checkpoint(
                folder=FIRST,
                upload=SECOND if second else "",
                timeout_seconds=TIMEOUT_SECONDS,
                visibility_seconds=VISIBILITY_SECONDS,
                **chosen,
            ),
        )
        self.settings = self.config.checkpoint
        self.turns = Turns(size, self.chance)
        self.processes: dict[int, Process] = {}  # by rank
        self.step, self.value, self.values = 0, 0, 0  # of the processes, and of all so far
        self.saves: dict[str, Saved] = {}  # committed at any time
        self.known_damaged: set[tuple[str, str]] = set()  # (url, name) that the processes have passed over
        self.has_reported = False  # a save that succeeded
        self.operations: dict[tuple[int, str], int] = {}  # of the action, by rank and place
        self.fault: Fault | None = None
        self.raised: CheckpointError | None = None
        self.dead: set[int] = set()
        self.tokens = 0

    @property
    def places(self) -> dict[str, Place]:
        """As rank 0 sees them."""
        return {url: disks[0] for url, disks in self.disks.items()}

    def place_of(self, rank: int, url: str) -> Place:
        return self.disks[url][rank // self.per_node if len(self.disks[url]) > 1 else 0]

    def weights_of(self, rank: int) -> list[str]:
        return [str(i) for i in range(WEIGHTS) if not self.is_sharded or i * self.size // WEIGHTS == rank]

    # ---- what the doubles need

    def open_store(self, url: str, settings: Any = None) -> Bucket:
        place = self.place_of(self.turns.running, url)
        return (Disk if place.is_disk else Bucket)(place)

    def build_ranks(self, timeout_seconds: int) -> Ranks:
        return Member(self.turns.running, self.size, None, self) if self.size > 1 else Ranks()

    def random_state(self) -> dict[str, torch.Tensor]:
        return {"cpu": torch.tensor([self.processes[self.turns.running].random_state])}

    def set_random_state(self, states: dict[str, torch.Tensor]) -> None:
        if states:
            self.processes[self.turns.running].random_state = int(states["cpu"])

    @contextmanager
    def operation(self, place: Place | str) -> Iterator[bool]:
        """Around what a store or the group of the ranks does. Gives whether a bit of it is to flip."""
        url, is_away = (place.url, place.is_away) if isinstance(place, Place) else (place, False)
        rank = self.turns.running
        if self.chance.random() < 0.3:
            self.turns.wait()
        number = self.operations.get((rank, url), 0)
        self.operations[rank, url] = number + 1
        self.now += 0.05
        fault = self.fault
        is_here = fault and (fault.rank % self.size, fault.url, fault.number) == (rank, url, number)
        kind = fault.kind if fault and is_here else ""
        if self.turns.is_broken and self.chance.random() < 0.1:
            kind = "dies before"  # by the launcher
        self._fail("fails before" if is_away else kind, "before", rank, url)
        yield kind == "flips"
        self._fail(kind, "after", rank, url)

    def _fail(self, kind: str, when: str, rank: int, url: str) -> None:
        if kind == f"dies {when}":
            self.dead.add(rank)
        if rank in self.dead:
            self.turns.is_broken = True
            raise Death
        if kind == f"fails {when}":
            if url == GROUP:
                self.turns.is_broken = True
                raise ConnectionLost("timed out")
            self.raised = CheckpointError("on purpose")
            raise self.raised

    def token(self, n_bytes: int) -> str:
        self.tokens += 1
        return f"{self.tokens * 40503 % 65536:04x}"  # in no order

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # ---- what must be true at each moment

    def note_commit(self, place: Place, name: str, manifest: dict[str, Any]) -> None:
        parts = {path.partition("/")[2]: disk.objects[path].data for disk, path in place.parts(name)}
        assert manifest["files"].keys() <= parts.keys(), f"{place.url}/{name} is committed before its files"
        files = {file: parts[file] for file in manifest["files"]} | {"MANIFEST.json": parts["MANIFEST.json"]}
        assert {file: len(files[file]) for file in manifest["files"]} == manifest["files"]
        held = Saved(manifest["step"], manifest["dataloader"]["samples"], manifest["world_size"], files)
        if name not in self.saves:
            assert (held.step, held.value, held.ranks) == (self.step, self.value, self.size)
        assert held == self.saves.setdefault(name, held)

    def check_may_go(self, place: Place, name: str) -> None:
        if name in place.damaged:
            return
        assert not self._stays_for_ever(name), f"{place.url}/{name} is kept for ever"
        newer = [other for other in place.committed() if other > name and (place.url, other) not in self.known_damaged]
        assert len(newer) >= self.settings.keep, f"{place.url}/{name} goes, newer are only {newer}"
        assert any(other in place.intact() for other in newer), f"{place.url}/{name} goes, none newer is intact"

    def _stays_for_ever(self, name: str) -> bool:
        every = self.settings.keep_every
        return self.settings.keep == 0 or (every > 0 and self.saves[name].step % every == 0)

    def readable(self, place: Place) -> set[str]:
        """The checkpoints of which every rank finds there all that it needs, as it was written."""
        return {name for name in place.committed() if self._is_readable(place.url, name)}

    def _is_readable(self, url: str, name: str) -> bool:
        saved = self.saves[name]
        index = pickle.loads(saved.files[".metadata"]).storage_data

        def has(rank: int, file: str, start: int = 0, end: int | None = None) -> bool:
            place, path = self.place_of(rank, url), f"{name}/{file}"
            return path in place.there() and place.objects[path].data[start:end] == saved.files[file][start:end]

        def needs(rank: int, tensor: str) -> bool:
            kind, part, *_ = tensor.split(".")
            return part == str(rank) and saved.ranks == self.size if kind == "rng" else part in self.weights_of(rank)

        return (
            has(0, "MANIFEST.json")
            and has(0, ".metadata")
            and all(
                has(rank, info.relative_path, info.offset, info.offset + info.length)
                for rank in range(self.size)
                for piece, info in index.items()
                if needs(rank, piece.fqn)
            )
        )

    def uploadable(self, place: Place) -> set[str]:
        """The newest, where it lies on nodes' own disks only: all of it on those of the ranks there are now."""
        first, *others = self.places.values()
        name = max(set().union(*(each.committed() for each in self.places.values())), default="")
        apart = self.place_of(self.size - 1, place.url) is not self.place_of(0, place.url)
        if place is not first or not (others and apart and self.is_calm):
            return set()
        if name not in place.committed() - others[0].committed():
            return set()

        def has(file: str, data: bytes) -> bool:
            path = f"{name}/{file}"
            ranks = range(self.size if file.endswith("distcp") else 1)
            disks = [self.place_of(rank, place.url) for rank in ranks]
            return any(path in disk.there() and disk.objects[path].data == data for disk in disks)

        return {name} if all(has(file, data) for file, data in self.saves[name].files.items()) else set()

    # ---- actions

    def do_restart(self, seconds: float = 0, fault: Fault | None = None) -> None:
        self._end()
        self.now += seconds
        self.turns = Turns(self.size, self.chance)
        self.step, self.values = 0, self.values + 1
        self.value = self.values

        def start(rank: int) -> None:
            process = self.processes[rank] = Process(self, rank)
            process.fill(self.value)

        if self._together(start, None) is None:
            self._load(fault)

    def do_roll_back(self, fault: Fault | None = None) -> None:
        """As after a bad step."""
        if self._are_alive():
            self._load(fault)

    def do_save(self, seconds: float = 0, fault: Fault | None = None) -> None:
        self.now += seconds
        if self._are_alive() and self.step >= self.config.training.steps:  # done: only a longer run goes on
            self.config = replace(self.config, training=Training(steps=self.step + LAST_STEP))
            self.do_restart()
        if self._are_alive():
            self._go_on(self.step + 1)
            self._check_saved(fault, lambda checkpoint: checkpoint.save(self.step))

    def do_finish(self, is_last: bool = True, fault: Fault | None = None) -> None:
        if self._are_alive():
            if is_last and self.step < self.config.training.steps:
                self._go_on(self.config.training.steps)
            self._check_saved(fault, lambda checkpoint: checkpoint.finish(self.step))
            self._end()

    def do_resize(self, size: int, per_node: int) -> None:
        self._end()
        self.size, self.per_node = size, per_node

    def do_damage(self, url: str, which: int, file: int, how: str, is_end: bool) -> None:
        if is_end:
            self._end()
        place = self.places.get(url)
        if not place or not place.committed(""):
            return
        name = sorted(place.committed(""), reverse=True)[which % len(place.committed(""))]
        parts = place.parts(name)
        disk, path = parts[file % len(parts)]
        object_ = disk.objects[path]
        if how == "delete":
            place.damaged.add(name)
            object_.removed = self.now
        elif object_.data:
            place.damaged.add(name)
            middle = len(object_.data) // 2
            rest = object_.data[middle + 1 :] if how == "flip" else b""
            object_.data = object_.data[:middle] + bytes([(object_.data[middle] + 1) % 256]) + rest

    def do_lose(self, node: int = 0) -> None:
        """The disk of a machine that is replaced."""
        self._end()
        if len(self.disks) == 2:
            disk = self.disks[FIRST][node % len(self.disks[FIRST])]
            disk.damaged |= {name.partition("/")[0] for name in disk.there()}
            disk.objects.clear()

    def do_renumber(self) -> None:
        """The ranks of two machines change places."""
        self._end()
        if len(self.disks[FIRST]) > 1:
            disks = self.disks[FIRST]
            disks[0], disks[1] = disks[1], disks[0]

    def do_stick(self, url: str, which: int, node: int = 0) -> None:
        if url in self.disks:
            place = self.disks[url][node % len(self.disks[url])]
            if place.there():
                place.stuck.add(sorted(place.there())[which % len(place.there())])

    def do_late(self, url: str, late: str, seconds: float, late_ranks: Sequence[int] = (0, 1, 2)) -> None:
        if (place := self.places.get(url)) and not place.is_disk:
            place.late, place.late_seconds, place.late_ranks = late, seconds, late_ranks

    def do_away(self, url: str) -> None:
        for place in self.disks.get(url, []):
            place.is_away = True

    def do_pass(self, seconds: float) -> None:
        self.now += seconds

    def do_back(self) -> None:
        for place in self._all():
            place.is_away = False

    def do_calm(self) -> None:
        """From now on all is well, but for what is damaged."""
        for place in self._all():
            place.late_seconds, place.late_ranks = 0, ()
            place.stuck.clear()
        self.do_back()

    # ---- their parts

    def _all(self) -> list[Place]:
        return [disk for disks in self.disks.values() for disk in disks]

    @property
    def is_calm(self) -> bool:
        return not any(place.late_seconds or place.is_away for place in self._all())

    def _are_alive(self) -> bool:
        """Whether there are processes; if not they are started, which fails where nothing is intact."""
        if not self.processes:
            self.do_restart()
        return bool(self.processes)

    def _end(self) -> None:
        self.processes = {}
        self.dead.clear()

    def _go_on(self, step: int) -> None:
        self.step, self.values = step, self.values + 1
        self.value = self.values
        for process in self.processes.values():
            process.fill(self.value)

    def _together(self, work: Callable[[int], Any], fault: Fault | None) -> BaseException | None:
        """`work` on all ranks, with a fault at which they may end, all alike. Gives the error, if one is expected.

        Without a fault nothing may fail.
        """
        self.operations, self.fault, self.raised = {}, fault, None
        errors = [error for _, error in self.turns.run(work)]
        self.fault = None
        failed = [error for error in errors if error is not None]
        for error in failed:
            if not isinstance(error, (Death, ConnectionLost, CheckpointError)):
                raise error
        if not failed:
            return None
        self._end()
        is_troubled = any(place.is_away or place.stuck for place in self._all())
        if not self.turns.is_broken:
            assert len(failed) == self.size, f"only some ranks fail: {errors}"
            assert len({str(error) for error in failed}) == 1, f"the ranks fail for different reasons: {errors}"
            if "on purpose" not in str(failed[0]):
                return failed[0]
            if fault and self.raised and not is_troubled:
                assert self.raised in _led_to(errors[fault.rank % self.size]), "where it failed is not said any more"
        assert fault or is_troubled, errors
        return failed[0]

    def _check_saved(self, fault: Fault | None, save: Callable[[CheckpointManager], None]) -> None:
        before = {url: place.committed() for url, place in self.places.items()}
        committed_before, known = set(self.saves), set(self.processes[0].checkpoint.savers)

        def save_and_wait(rank: int) -> None:
            save(self.processes[rank].checkpoint)
            self.processes[rank].checkpoint.wait()
            self.has_reported = True

        error = self._together(save_and_wait, fault)
        if error:
            if type(error) is CheckpointError and "on purpose" not in str(error):
                raise error
            return
        new = self.saves.keys() - committed_before
        for place in self.places.values():
            assert new <= place.intact("")
            if not fault and self.is_calm:
                self._check_kept(place, before[place.url], new, known)

    def _stuck_in(self, place: Place) -> set[str]:
        return {name.partition("/")[0] for disk in place.disks for name in disk.stuck & disk.there()}

    def _unclear(self, place: Place, names: set[str]) -> set[str]:
        """Those whose manifest is damaged, so that it does not say that they are this run's."""
        manifests = {name: place.objects[f"{name}/MANIFEST.json"].data for name in names}
        return {name for name, data in manifests.items() if data != self.saves[name].files["MANIFEST.json"]}

    def _check_kept(self, place: Place, before: set[str], new: set[str], known: set[str]) -> None:
        """After a save without trouble, what is there is what the settings say.

        `known`: whose run was known before. The other place may have told of more.
        """
        steps = {name for name in new if name.startswith("step")}
        stuck, models = self._stuck_in(place), place.committed("model")
        if steps:
            there = {name for name in before | steps if (place.url, name) not in self.known_damaged}
            unclear, answers = self._unclear(place, before) & there, []
            for told in (known, known | self.processes[0].checkpoint.savers.keys()):
                counted = there - (unclear - told)
                stay = {name for name in counted if self._stays_for_ever(name)} | steps | (unclear - told)
                answers.append((stay | set(sorted(counted, reverse=True)[: self.settings.keep])) - stuck)
            assert place.committed() - stuck in answers
        if new:
            for disk in {id(disk): disk for disk in (self.place_of(i, place.url) for i in range(self.size))}.values():
                old = {name for name in disk.begun() if self.now - int(name[-12:-4], 16) > OLD_SECONDS + 10}
                assert old <= stuck, f"left over in {place.url}, {disk.disks.index(disk)}: {old}"
        if new - steps:  # of each step one
            kinds = {name.rpartition("-")[0] for name in new}
            clear = models - stuck - (self._unclear(place, models) - known)
            assert {name for name in clear if name.rpartition("-")[0] in kinds} == new - steps
        assert models or self.step != self.config.training.steps or not self.settings.save_model

    def _load(self, fault: Fault | None) -> None:
        order = list(self.places.values())

        def in_order(names: Any) -> list[tuple[str, int]]:
            """(name, place) as a resume tries them, the last one first."""
            return sorted((name, -i) for i, place in enumerate(order) for name in names(place))

        everything = in_order(lambda place: place.committed())
        seen = in_order(lambda place: (self.readable(place) | self.uploadable(place)) & place.listed())
        processes, before, steps = self.processes, self.processes[0].random_state, set[int]()
        self.known_damaged = set()  # a start knows of none but those that it passes over

        def load(rank: int) -> None:
            steps.add(processes[rank].checkpoint.load())
            processes[rank].checkpoint.wait()

        if error := self._together(load, fault):
            is_meant = self.turns.is_broken or "on purpose" in str(error)
            others = [name for disk in self.disks[FIRST][1:] for name in disk.there() if "step" in name]
            newest = max((name.partition("/")[0] for name in others if name.endswith("MANIFEST.json")), default="")
            is_meant |= self.is_tight and newest > max(seen, default=("", 0))[0]  # and is not removed to make room
            if not is_meant and (seen or not any(name.startswith("step") for name in self.saves)):
                raise AssertionError(f"{seen} are intact, {list(self.saves)} were saved") from error
            return
        (self.step,) = steps
        process = processes[0]
        if process.checkpoint.newest_step is None:
            assert not self.has_reported
            assert not seen
            assert not (everything and self.is_calm), "a fresh start beside what was committed"
            assert self.step == 0
            for process in processes.values():
                process.check_filled(self.value, before)
            return
        self.value = process.samples
        name = max(name for name, save in self.saves.items() if (save.step, save.value) == (self.step, self.value))
        passed = process.checkpoint.damaged
        for process in processes.values():
            process.check_filled(self.value, self.value if self.saves[name].ranks == self.size else before)
            assert process.checkpoint.damaged == passed
        assert not seen or name >= seen[-1][0], f"{name} was loaded, {seen[-1]} is newer"
        if self.is_calm:
            assert name == seen[-1][0]
            assert passed == {(order[-i].url, other) for other, i in everything if (other, i) > seen[-1]}
        self.known_damaged = set(passed)
        for url, other in passed:
            self.places[url].damaged.add(other)


def _led_to(error: BaseException | None) -> list[BaseException]:
    """An error, and those that led to it."""
    return [error, *_led_to(error.__cause__), *_led_to(error.__context__)] if error else []


class AtOnce:
    """An executor whose threads take no turns."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future


def start_at_once(checkpoint: CheckpointManager, work: Any) -> None:
    checkpoint.under_way = AtOnce(1).submit(work)


def play(actions: list[tuple[Any, ...]], late: str = "", **chosen: Any) -> World:
    """A history, and after it saves without trouble, which bring all places in order."""
    defaults = {"first": "bucket", "second": "", "is_tight": False, "keep": 1}
    defaults |= {"size": 1, "per_node": 1, "is_sharded": False, "seed": 0}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        world = World(Path(folder), **{**defaults, **chosen})
        clock = SimpleNamespace(
            time=lambda: world.now, monotonic=lambda: world.now, time_ns=lambda: int(world.now * 1e9), sleep=world.sleep
        )
        for module in (manager, names, retention):
            patches.enter_context(patch.object(module, "time", clock))
        patches.enter_context(patch.object(names, "secrets", SimpleNamespace(token_hex=world.token)))
        for module in (storage, retention):
            patches.enter_context(patch.object(module, "ThreadPoolExecutor", AtOnce))
        for name in ("open_store", "build_ranks", "random_state", "set_random_state"):
            patches.enter_context(patch.object(manager, name, getattr(world, name)))
        patches.enter_context(patch.object(CheckpointManager, "_start", start_at_once))
        world.do_late(late, "MANIFEST.json", 400.0)
        for action in actions:
            getattr(world, f"do_{action[0]}")(*action[1:])
        world.do_calm()
        world.do_restart()
        world.do_save(1000.0)
        world.do_save(1000.0)
        world.do_finish()
    return world


# ---------------------------------------------------------------- histories

urls = st.sampled_from([FIRST, SECOND])
kinds = ["dies before", "dies after", "fails before", "fails after", "flips", "keeps all"]
ranks = st.integers(0, 2)
where = st.sampled_from([FIRST, FIRST, SECOND, SECOND, GROUP])
numbers = st.integers(0, 5) | st.integers(0, 20)  # most ranks do little
faults = st.none() | st.builds(Fault, where, numbers, st.sampled_from(kinds), ranks)
seconds = st.sampled_from([0.0, 2.0, 150.0])
saves = st.tuples(st.just("save"), seconds, faults)
restarts = st.tuples(st.just("restart"), seconds, faults)
newest = st.sampled_from([0, 0, 0, 1, 2])
how = st.sampled_from(["flip", "cut", "delete"])
damages = st.tuples(st.just("damage"), urls, newest, st.integers(0, 7), how, st.booleans())
actions = st.one_of(
    saves,
    saves,
    saves,
    restarts,
    damages,
    st.tuples(st.just("finish"), st.booleans(), faults),
    st.tuples(st.just("roll_back"), faults),
    st.tuples(
        st.just("late"),
        urls,
        st.sampled_from(["", "MANIFEST.json"]),
        st.sampled_from([4.0, 400.0]),
        st.sampled_from([(0, 1, 2), (0,), (1, 2)]),
    ),
    st.tuples(st.just("stick"), urls, st.integers(0, 15), ranks),
    st.tuples(st.just("away"), urls),
    st.tuples(st.just("back")),
    st.tuples(st.just("lose"), ranks),
    st.tuples(st.just("renumber")),
    st.tuples(st.just("resize"), st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.just("calm")),
)
# What follows from a damage, and from an upload that was cut, takes several actions.
stubborn = st.tuples(st.just("save"), seconds, st.builds(Fault, urls, st.just(0), st.just("keeps all")))
cut_upload = st.builds(Fault, st.just(SECOND), st.integers(0, 20), st.sampled_from(kinds), ranks)
cut = st.tuples(st.just("save"), seconds, cut_upload)
stories = (
    actions.map(lambda action: [action]) | st.tuples(saves, damages, stubborn, saves) | st.tuples(cut, restarts, saves)
)


HISTORY = (
    st.lists(stories, max_size=12),
    st.fixed_dictionaries(
        {
            "first": st.sampled_from(["disk", "bucket", "nodes", "nodes"]),
            "size": st.sampled_from([1, 2, 3]),
            "per_node": st.sampled_from([1, 1, 2]),
            "is_sharded": st.booleans(),
            "seed": st.integers(0, 1000),
            "second": st.sampled_from(["bucket", "bucket", "disk", ""]),
            "late": st.sampled_from(["", "", FIRST, SECOND]),
            "is_tight": st.booleans(),
            "keep": st.sampled_from([1, 2, 3, 0]),
            "keep_every": st.sampled_from([0, 2, 3]),
            "mode": st.sampled_from(["sync", "async"]),
            "save_model": st.booleans(),
        }
    ),
)


@settings(max_examples=HISTORIES or 300, derandomize=not HISTORIES, print_blob=False)
@given(*HISTORY)
def test_no_history_loses_mixes_or_leaves_anything(stories, chosen):
    play([action for story in stories for action in story], **chosen)


@pytest.mark.parametrize("first", ["bucket", "disk"])
def test_what_cannot_be_removed_keeps_nothing_else_from_it(first):
    play([("save",), ("stick", FIRST, 1), ("save",), ("save",), ("save",)], first=first)


def test_an_old_checkpoint_uploaded_by_this_start_outlasts_later_saves_where_listings_lag():
    """Its name is old, and its manifest in the second place not listed yet: it is no leftover."""
    cut_upload = ("save", 0.0, Fault(SECOND, 0, "dies before"))
    world = play([cut_upload, ("restart", 150.0), ("save",)], late=SECOND, first="disk", second="bucket", keep=0)
    assert world.saves.keys() == world.places[SECOND].committed()


def test_damage_in_what_a_smaller_run_does_not_need_does_not_end_each_start_by_its_upload():
    """The random state of rank 1, of which the second place lacks a copy, as the upload was cut."""
    cut_upload = ("save", 0.0, Fault(SECOND, 0, "dies before"))
    actions = [cut_upload, ("damage", FIRST, 0, 4, "flip", True), ("resize", 1, 1), ("restart",)]
    play(actions, first="disk", second="bucket", size=2, is_sharded=True)


def test_a_damaged_checkpoint_leaves_no_random_state_where_the_one_before_is_of_another_size():
    actions = [("save",), ("resize", 2, 1), ("save",), ("damage", FIRST, 0, 5, "flip", True), ("restart",)]
    play(actions, first="disk", keep=3, is_sharded=True)


def test_what_a_former_rank_0_has_is_not_removed_to_make_room():
    """Its upload was cut; an older one can be loaded."""
    actions = [("save",), ("save", 0.0, Fault(SECOND, 0, "dies before")), ("renumber",)]
    play(actions, first="nodes", second="bucket", size=2, is_tight=True)
