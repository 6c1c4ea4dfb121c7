"""Made-up histories of saves, deaths, damage and listings that lag, against a simple model of checkpoints.

HISTORIES=5000 python -m pytest tests/unit/test_checkpoint_protocol.py

The manager is the real one, alone in its process. Stores, clock and threads are doubles: what is in a place is known,
any operation can fail or be the last one of the process, and a history runs the same way every time.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from checkpoint.state import allocate_optimizer_state
from checkpoint.stores import CheckpointError, DamagedError, LocalStore
from config import Checkpoint, Config, Training

HISTORIES = int(os.environ.get("HISTORIES", "0"))  # 0: the same few hundred each time
TIMEOUT_SECONDS, VISIBILITY_SECONDS = 60, 10.0
OLD_SECONDS = 2 * TIMEOUT_SECONDS  # from then on what was never committed is a leftover
LAST_STEP = 100  # further than saves alone get
FIRST, SECOND = "first", "second"


class Death(BaseException):
    """The process was killed: whatever it still does reaches no store."""


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
    is_away: bool = False

    def seen(self, name: str, at_most_seconds: float = 1e9) -> bool:
        """Whether an object is shown by now."""
        object_, now = self.objects[name], self.world.now
        is_late = self.late_seconds and name.endswith(self.late)
        lag = min(self.late_seconds, at_most_seconds) if is_late else 0
        return now >= object_.written + lag and (object_.removed is None or now < object_.removed + lag)

    def there(self, checkpoint: str = "") -> set[str]:
        """What is there in truth, of all or of one checkpoint."""
        return {
            name
            for name, object_ in self.objects.items()
            if object_.removed is None and name.startswith(f"{checkpoint}/" if checkpoint else "")
        }

    def committed(self, kind: str = "step") -> set[str]:
        return {name.partition("/")[0] for name in self.there() if name.endswith("/MANIFEST.json") and kind in name}

    def begun(self) -> set[str]:
        """Checkpoints that are not committed, but for those that were never begun."""
        return {name.partition("/")[0] for name in self.there() if "/" in name} - self.committed("")

    def intact(self, kind: str = "step") -> set[str]:
        return self.committed(kind) - self.damaged

    def listed(self) -> set[str]:
        """Checkpoints whose manifest a listing shows."""
        return {name.partition("/")[0] for name in self.objects if name.endswith("/MANIFEST.json") and self.seen(name)}

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
        if file == "MANIFEST.json" and checkpoint in self.committed():
            self.world.check_may_go(self, checkpoint)
        self.objects[name].removed = self.world.now
        self.check_whole()

    def check_whole(self) -> None:
        there = self.there()
        for checkpoint in self.committed("") - self.damaged:
            manifest = json.loads(self.objects[f"{checkpoint}/MANIFEST.json"].data)["manifest"]
            lacking = [file for file in manifest["files"] if f"{checkpoint}/{file}" not in there]
            assert not lacking, f"{self.url}/{checkpoint} is committed without {lacking}"


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
                if self.place.seen(name) and name.startswith(f"{prefix}/" if prefix else "")
            }

    def _data(self, name: str) -> bytes:
        with self.world.operation(self.place) as flip:
            for _ in range(2):  # at first, and at the end of the wait
                if name in self.place.objects and self.place.seen(name, VISIBILITY_SECONDS / 2):
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

    def folders(self) -> set[str]:
        with self.world.operation(self.place):
            return {name.partition("/")[0] for name in self.place.there()}

    def touch(self, name: str) -> None:
        with self.world.operation(self.place):
            self.place.objects[name] = Object(b"", self.world.now)

    def free_bytes(self) -> int:
        with self.world.operation(self.place):
            return 0 if self.world.is_tight and self.place.begun() else 1 << 30


class Process:
    """A training run with one weight; all that it saves is one number."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.samples = 0
        self.checkpoint = CheckpointManager(
            world.config, world.run_folder, [self.model], self.optimizer, dataloader=self, identity={}
        )

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def fill(self, value: int) -> None:
        allocate_optimizer_state(self.optimizer)
        self.samples = value
        torch.manual_seed(value)
        with torch.no_grad():
            self.model.weight.fill_(value)
            self.optimizer.state[self.model.weight]["momentum_buffer"].fill_(value)

    def check_filled(self, value: int) -> None:
        momentum = self.optimizer.state[self.model.weight]["momentum_buffer"]
        assert [self.samples, self.model.weight.item(), momentum.item()] == [value] * 3
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(value).get_state())


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Fault:
    """What happens at one operation of an action in one place."""

    url: str
    number: int  # of the operation there; none counts where nothing can be removed
    kind: str


class World:
    """Places, clock and process, and what must be true of them."""

    def __init__(self, run_folder: Path, first: str, second: str, is_tight: bool, **chosen: Any) -> None:
        self.now, self.run_folder, self.is_tight = 1.7e9, run_folder, is_tight
        self.places = {
            url: Place(url, self, kind == "disk") for url, kind in ((FIRST, first), (SECOND, second)) if kind
        }
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
        self.process: Process | None = None
        self.step, self.value, self.values = 0, 0, 0  # of the process, and of all so far
        self.saves: dict[str, tuple[int, int]] = {}  # committed at any time: name → step and value
        self.known_damaged: set[tuple[str, str]] = set()  # (url, name) that the process has passed over
        self.has_reported = False  # a save that succeeded
        self.operations = dict.fromkeys(self.places, 0)  # of the action
        self.fault: Fault | None = None
        self.is_dead, self.tokens = False, 0

    # ---- what the doubles need

    def open_store(self, url: str, settings: Any = None) -> Bucket:
        return (Disk if self.places[url].is_disk else Bucket)(self.places[url])

    @contextmanager
    def operation(self, place: Place) -> Iterator[bool]:
        """Around what a store does. Gives whether a bit of it is to flip."""
        here = (place.url, self.operations[place.url])
        self.operations[place.url] += 1
        self.now += 0.05
        kind = self.fault.kind if self.fault and here == (self.fault.url, self.fault.number) else ""
        self._fail("fails before" if place.is_away else kind, "before")
        yield kind == "flips"
        self._fail(kind, "after")

    def _fail(self, kind: str, when: str) -> None:
        self.is_dead |= kind == f"dies {when}"
        if self.is_dead:
            raise Death
        if kind == f"fails {when}":
            raise CheckpointError("on purpose")

    def token(self, n_bytes: int) -> str:
        self.tokens += 1
        return f"{self.tokens * 40503 % 65536:04x}"  # in no order

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # ---- what must be true at each moment

    def note_commit(self, place: Place, name: str, manifest: dict[str, Any]) -> None:
        held = manifest["step"], manifest["dataloader"]["samples"]
        assert held == self.saves.setdefault(name, (self.step, self.value))
        original = self.places[FIRST]
        for file, size in manifest["files"].items():
            assert f"{name}/{file}" in place.there(), f"{place.url}/{name} is committed before {file}"
            data = place.objects[f"{name}/{file}"].data
            assert len(data) == size
            assert place is original or data == original.objects[f"{name}/{file}"].data

    def check_may_go(self, place: Place, name: str) -> None:
        if name in place.damaged:
            return
        assert not self._stays_for_ever(name), f"{place.url}/{name} is kept for ever"
        newer = [other for other in place.committed() if other > name and (place.url, other) not in self.known_damaged]
        assert len(newer) >= self.settings.keep, f"{place.url}/{name} goes, newer are only {newer}"
        assert any(other in place.intact() for other in newer), f"{place.url}/{name} goes, none newer is intact"

    def _stays_for_ever(self, name: str) -> bool:
        every = self.settings.keep_every
        return self.settings.keep == 0 or (every > 0 and self.saves[name][0] % every == 0)

    # ---- actions

    def do_restart(self, seconds: float = 0, fault: Fault | None = None) -> None:
        self._end()
        self.now += seconds
        process = self.process = Process(self)
        self._go_on(process, 0)
        self._load(process, fault)

    def do_roll_back(self, fault: Fault | None = None) -> None:
        """As after a bad step."""
        if process := self._alive():
            self._load(process, fault)

    def do_save(self, seconds: float = 0, fault: Fault | None = None) -> None:
        self.now += seconds
        if process := self._alive():
            self._go_on(process, self.step + 1)
            self._check_saved(fault, lambda: process.checkpoint.save(self.step))

    def do_finish(self, is_last: bool = True, fault: Fault | None = None) -> None:
        if process := self._alive():
            if is_last and self.step < LAST_STEP:
                self._go_on(process, LAST_STEP)
            self._check_saved(fault, lambda: process.checkpoint.finish(self.step))
            self._end()

    def do_damage(self, url: str, which: int, file: int, how: str, is_end: bool) -> None:
        if is_end:
            self._end()
        place = self.places.get(url)
        if not place or not place.committed(""):
            return
        name = sorted(place.committed(""), reverse=True)[which % len(place.committed(""))]
        path = sorted(place.there(name))[file % len(place.there(name))]
        object_ = place.objects[path]
        if how == "delete":
            place.damaged.add(name)
            object_.removed = self.now
        elif object_.data:
            place.damaged.add(name)
            middle = len(object_.data) // 2
            rest = object_.data[middle + 1 :] if how == "flip" else b""
            object_.data = object_.data[:middle] + bytes([(object_.data[middle] + 1) % 256]) + rest

    def do_lose(self) -> None:
        """The disk of a machine that is replaced."""
        self._end()
        if len(self.places) == 2:
            self.places[FIRST].objects.clear()

    def do_stick(self, url: str, which: int) -> None:
        if (place := self.places.get(url)) and place.there():
            place.stuck.add(sorted(place.there())[which % len(place.there())])

    def do_late(self, url: str, late: str, seconds: float) -> None:
        if (place := self.places.get(url)) and not place.is_disk:
            place.late, place.late_seconds = late, seconds

    def do_away(self, url: str) -> None:
        if place := self.places.get(url):
            place.is_away = True

    def do_pass(self, seconds: float) -> None:
        self.now += seconds

    def do_back(self) -> None:
        for place in self.places.values():
            place.is_away = False

    def do_calm(self) -> None:
        """From now on all is well, but for what is damaged."""
        for place in self.places.values():
            place.late_seconds = 0
            place.stuck.clear()
        self.do_back()

    # ---- their parts

    @property
    def is_calm(self) -> bool:
        return not any(place.late_seconds or place.is_away for place in self.places.values())

    def _alive(self) -> Process | None:
        """The process; if there is none it is started, which fails where nothing is intact."""
        if self.process is None:
            self.do_restart()
        return self.process

    def _end(self) -> None:
        self.process, self.is_dead = None, False

    def _go_on(self, process: Process, step: int) -> None:
        self.step, self.values = step, self.values + 1
        self.value = self.values
        process.fill(self.value)

    @contextmanager
    def _process_may_end(self, fault: Fault | None) -> Iterator[None]:
        """An action with a fault, at which the process may end; without, nothing may fail."""
        self.operations, self.fault = dict.fromkeys(self.places, 0), fault
        try:
            yield
        except (Death, CheckpointError) as error:
            self.process = None
            is_meant = type(error) is Death or "on purpose" in str(error)
            if not is_meant or not (fault or any(place.is_away or place.stuck for place in self.places.values())):
                raise
            self.is_dead = False
        finally:
            self.fault = None

    def _check_saved(self, fault: Fault | None, save: Any) -> None:
        before = {url: place.committed() for url, place in self.places.items()}
        assert self.process
        process = self.process
        committed_before = set(self.saves)
        with self._process_may_end(fault):
            save()
            process.checkpoint.wait()
            self.has_reported = True
            new = self.saves.keys() - committed_before
            for place in self.places.values():
                assert new <= place.intact("")
                if not fault and self.is_calm:
                    self._check_kept(place, before[place.url], new)

    def _stuck_in(self, place: Place) -> set[str]:
        return {name.partition("/")[0] for name in place.stuck & place.there()}

    def _check_kept(self, place: Place, before: set[str], new: set[str]) -> None:
        """After a save without trouble, what is there is what the settings say."""
        steps = {name for name in new if name.startswith("step")}
        stuck, models = self._stuck_in(place), place.committed("model")
        if steps:
            counted = [name for name in before | steps if (place.url, name) not in self.known_damaged]
            stay = {name for name in counted if self._stays_for_ever(name)} | steps
            stay |= set(sorted(counted, reverse=True)[: self.settings.keep])
            assert place.committed() - stuck == stay - stuck
        if new:
            old = {name for name in place.begun() if self.now - int(name[-12:-4], 16) > OLD_SECONDS + 10}
            assert old <= stuck, f"left over in {place.url}: {old}"
        if new - steps:
            assert models - stuck == new - steps
        assert models or self.step != LAST_STEP or not self.settings.save_model

    def _load(self, process: Process, fault: Fault | None) -> None:
        order = list(self.places.values())

        def in_order(names: Any) -> list[tuple[str, int]]:
            """(name, place) as a resume tries them, the last one first."""
            return sorted((name, -i) for i, place in enumerate(order) for name in names(place))

        everything = in_order(lambda place: place.committed())
        seen = in_order(lambda place: place.intact() & place.listed())
        with self._process_may_end(fault):
            try:
                self.step = process.checkpoint.load()
            except CheckpointError as error:
                if "on purpose" in str(error):
                    raise
                if seen or not any(name.startswith("step") for name in self.saves):
                    raise AssertionError(f"{seen} are intact, {list(self.saves)} were saved") from error
                self.process = None
                return
            if process.checkpoint.newest_step is None:
                assert not self.has_reported
                assert not seen
                assert not (everything and self.is_calm), "a fresh start beside what was committed"
                assert self.step == 0
                process.check_filled(self.value)
                return
            self.value = process.samples
            name = max(name for name, save in self.saves.items() if save == (self.step, self.value))
            process.check_filled(self.value)
            assert not seen or name >= seen[-1][0], f"{name} was loaded, {seen[-1]} is newer"
            passed = process.checkpoint.damaged
            if self.is_calm:
                assert name == seen[-1][0]
                assert passed == {(order[-i].url, other) for other, i in everything if (other, i) > seen[-1]}
            self.known_damaged = set(passed)
            process.checkpoint.wait()


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
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        world = World(Path(folder), **{**defaults, **chosen})
        clock = SimpleNamespace(
            time=lambda: world.now, monotonic=lambda: world.now, time_ns=lambda: int(world.now * 1e9), sleep=world.sleep
        )
        for module in (manager, names, retention):
            patches.enter_context(patch.object(module, "time", clock))
        patches.enter_context(patch.object(names, "secrets", SimpleNamespace(token_hex=world.token)))
        patches.enter_context(patch.object(storage, "ThreadPoolExecutor", AtOnce))
        patches.enter_context(patch.object(manager, "open_store", world.open_store))
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
faults = st.none() | st.builds(Fault, urls, st.integers(0, 20), st.sampled_from(kinds))
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
    st.tuples(st.just("late"), urls, st.sampled_from(["", "MANIFEST.json"]), st.sampled_from([4.0, 400.0])),
    st.tuples(st.just("stick"), urls, st.integers(0, 15)),
    st.tuples(st.just("away"), urls),
    st.tuples(st.just("back")),
    st.tuples(st.just("lose")),
    st.tuples(st.just("calm")),
)
# What follows from a damage, and from an upload that was cut, takes several actions.
stubborn = st.tuples(st.just("save"), seconds, st.builds(Fault, urls, st.just(0), st.just("keeps all")))
cut = st.tuples(st.just("save"), seconds, st.builds(Fault, st.just(SECOND), st.integers(0, 20), st.sampled_from(kinds)))
stories = (
    actions.map(lambda action: [action]) | st.tuples(saves, damages, stubborn, saves) | st.tuples(cut, restarts, saves)
)


@settings(max_examples=HISTORIES or 300, derandomize=not HISTORIES, print_blob=False)
@given(
    st.lists(stories, max_size=12),
    st.fixed_dictionaries(
        {
            "first": st.sampled_from(["disk", "bucket"]),
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
