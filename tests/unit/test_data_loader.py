"""The loader against the definition of the order: exact, whatever changes between two steps."""

import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice, pairwise, zip_longest

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoint.manifest import encode_manifest
from data.loader import IGNORED, DataLoader, validation_batches
from data.shards import DataError, Split, open_dataset
from data.stream import Stream
from storage import StoreError
from tests.corpus import data_config, expected_stream, prepare, stored_blocks, unique_documents, write_dataset

SEED, WINDOW = 3, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    rng = random.Random(0)
    root = tmp_path_factory.mktemp("datasets")
    ranges = (range(1, 400), range(400, 500), range(500, 1000))
    return [
        write_dataset(root / name, unique_documents(rng, own, longest), validation=unique_documents(rng, own, 9)[0])
        for name, own, longest in zip("abc", ranges, (25, 3, 150), strict=True)
    ]


def config_of(folders, **overrides):
    return data_config(*folders, run__seed=SEED, data__window_blocks=WINDOW, **overrides)


def stored(state):
    """The state as it comes back out of a checkpoint."""
    return json.loads(encode_manifest({"dataloader": state}))["manifest"]["dataloader"]


def global_samples(loaders, steps):
    """(tokens, labels, positions) of every sample that all ranks together deliver, in the global order."""
    samples = []
    for _ in range(steps):
        ranks = [loader.next_step() for loader in loaders]
        for microbatch in zip(*ranks, strict=True):
            for batch in microbatch:
                assert batch.positions is not None
                samples += zip(*(field.tolist() for field in batch), strict=True)
    return samples


def positions_in_sample(part):
    """From 0 at the start of the sample and of each document in it, of (place in its document, token)."""
    start, positions = 0, []
    for i, (place, _) in enumerate(part):
        start = i if place == 0 else start
        positions.append(i - start)
    return positions


class Reference:
    """The same order by the plainest means: lists and a generator for each dataset."""

    def __init__(self, folders):
        self.size, self.stream, self.next, self.mixture = {}, {}, {}, None
        for folder in folders:
            blocks = stored_blocks(folder)
            self.size[folder] = sum(len(document) for block in blocks for document in block)
            self.stream[folder] = expected_stream(blocks, open_dataset(str(folder)).hash, SEED, WINDOW)
            self.next[folder] = next(self.stream[folder])

    def take(self, folders, weights, seq_len, count):
        if (folders, weights, seq_len) != self.mixture:
            self.mixture, self.taken = (folders, weights, seq_len), [0] * len(folders)
        weights = weights or [self.size[folder] for folder in folders]
        samples = []
        for _ in range(count):
            due = [(taken + 0.5) / (weight / sum(weights)) for taken, weight in zip(self.taken, weights, strict=True)]
            chosen = due.index(min(due))
            self.taken[chosen] += 1
            folder = folders[chosen]
            part = [self.next[folder], *islice(self.stream[folder], seq_len)]
            self.next[folder] = part[-1]
            tokens = [token for _, token in part]
            samples.append((tokens[:-1], tokens[1:], positions_in_sample(part[:-1])))
        return samples


phase = st.fixed_dictionaries(
    {
        "dp_size": st.integers(1, 4),
        "local_batch_size": st.integers(1, 3),
        "accumulation": st.integers(1, 3),
        "prefetch_steps": st.integers(0, 3),
        "steps": st.integers(0, 4),
        "read_ahead": st.integers(0, 2),
        "seq_len": st.sampled_from([4, 4, 7, 40]),
        "mixture": st.sampled_from([((0,), (1.0,)), ((0, 1, 2), (5.0, 1.0, 2.0)), ((2, 1), (0.3, 0.7)), ((0, 2), ())]),
    }
)
STEPS = {"dp_size": 2, "local_batch_size": 2, "accumulation": 1, "prefetch_steps": 1, "read_ahead": 0, "seq_len": 7}
WEIGHTS_ALONE = [
    {**STEPS, "steps": 4, "mixture": ((0, 1, 2), weights)} for weights in ((5.0, 1.0, 2.0), (1.0, 1.0, 6.0))
]


@settings(max_examples=20)
@given(phases=st.lists(phase, min_size=1, max_size=5))
@example(phases=WEIGHTS_ALONE)
@example(phases=[{**STEPS, "steps": 9, "mixture": ((0, 2), ())}])
def test_order_survives_every_change_between_two_steps(folders, phases):
    """World size, batches, prefetch, seq_len, weights and datasets change; the order is the reference's."""
    reference, state = Reference(folders), None
    for p in phases:
        chosen = [folders[i] for i in p["mixture"][0]]
        config = config_of(
            chosen,
            data__weights=list(p["mixture"][1]),
            data__prefetch_steps=p["prefetch_steps"],
            data__mask_documents=True,
            training__seq_len=p["seq_len"],
            training__local_batch_size=p["local_batch_size"],
            training__global_batch_size=p["local_batch_size"] * p["accumulation"] * p["dp_size"],
        )
        loaders = [DataLoader(config, rank, p["dp_size"]) for rank in range(p["dp_size"])]
        for loader in loaders:
            if state:
                loader.load_state_dict(stored(state))
        samples = global_samples(loaders, p["steps"])
        assert samples == reference.take(chosen, p["mixture"][1], p["seq_len"], len(samples))
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        assert len(json.dumps(states[0])) <= 1024
        for loader in loaders[: p["read_ahead"]]:  # steps whose consumer died before its checkpoint
            loader.next_step()
        for loader in loaders:
            loader.close()
        state = states[0]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("def f0(x): return 1", "def f0(x): return"),
        ("日本語" * 100, "日本語" * 4 + "日"),  # no more than 40 bytes, in whole characters
    ],
)
def test_a_sample_without_a_prompt_begins_like_a_held_out_document(tmp_path, first, expected):
    lines = [json.dumps({"text": text}) for text in (" \n", first, "much more text " * 20)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    prepare([str(tmp_path / "text.jsonl")], str(tmp_path / "data"), validation_fraction=0, vocab_size=257)
    config = data_config(tmp_path / "data", training__seq_len=128, validation__sample_tokens=4)
    with closing(DataLoader(config, 0, 1)) as loader:
        assert loader.settle(config).validation.sample_prompt == expected


def test_batches_follow_the_tokens_seen_whoever_reads_them(folders):
    """Counted by hand: 8 steps of 4 x 7 tokens until 224 are seen, 3 of 12 x 7 until 450 are; none of 4 fits to 460."""
    by_hand = [4] * 8 + [12] * 3 + [24] * 2
    common = {"training__seq_len": 7, "data__mask_documents": True}

    def loaders_of(dp_size, local, batches="4@0, 12@224, 4@450, 24 @ 460"):
        batch = {"training__local_batch_size": local, "training__global_batch_size": batches}
        return [DataLoader(config_of(folders, **common, **batch), rank, dp_size) for rank in range(dp_size)]

    expected = global_samples(loaders_of(1, sum(by_hand), 0), 1)
    found = []
    state = None
    for number, size in enumerate(by_hand):  # a new start for each step
        loaders = loaders_of(*[(1, 4), (2, 2), (4, 1)][number % 3])
        for loader in loaders:
            if state:
                loader.load_state_dict(stored(state))
        seen = loaders[0].tokens_seen
        found += global_samples(loaders, 1)
        assert loaders[-1].tokens_per_step == loaders[0].tokens_seen - seen == 7 * size
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.close()
    assert found == expected
    (loader,) = loaders_of(1, 4)
    assert global_samples([loader], len(by_hand)) == expected
    loader.close()
    every = "8 steps of 28, 3 steps of 84, 0 steps of 28, 2 steps of 168 read them 0.743 times"
    assert loader.describe(13).endswith(every)


def test_sequences_grow_with_the_tokens_seen(folders):
    """By hand: of 2 x 12 tokens, 4 steps begin before 96 are seen, 5 more before 200. Rows are cut."""
    lengths = {"training__seq_len": "3 @ 0, 6 @ 96, 12 @ 200", "data__mask_documents": True}
    loader = DataLoader(config_of(folders[:1], **lengths, training__local_batch_size=2), 0, 1)
    reference = Reference(folders)
    for seq_len in [3] * 4 + [6] * 5 + [12] * 3:
        samples = global_samples([loader], 1)
        assert samples == reference.take(folders[:1], (1.0,), seq_len, 24 // seq_len)
        assert (loader.seq_len, loader.tokens_per_step) == (seq_len, 24)
    loader.close()


def test_shares_are_the_same_on_every_python(folders):
    """`sum` of (0.7, 0.2, 0.1) is 0.9999999999999999 up to 3.11 and 1.0 from 3.12 on, and ties would fall otherwise."""
    weights = (0.7, 0.2, 0.1)
    loader = DataLoader(config_of(folders, data__weights=list(weights), training__seq_len=7), 0, 1)
    assert tuple(share for *_, share in loader.state_dict()["datasets"]) == weights
    loader.close()


def test_a_resume_names_the_datasets_that_begin_and_those_that_are_left(folders, caplog):
    a, b = (open_dataset(str(folder)).hash for folder in folders[:2])
    state = None
    for chosen, said in (([0], ""), ([0], ""), ([1], f"{a} .* 64 tokens.*{b}"), ([1, 0], ""), ([1, 0], "")):
        caplog.clear()
        with closing(DataLoader(config_of([folders[i] for i in chosen], training__seq_len=4), 0, 1)) as loader:
            if state:
                loader.load_state_dict(stored(state))
            loader.next_step()
            state = loader.state_dict()
        assert re.fullmatch(f".*{said}.*" * bool(said), " ".join(caplog.messages))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "data state: of version 2, this code reads"),
        ({"seed": 4}, r"run\.seed = 3: the checkpoint was trained with 4"),
        ({"window_blocks": 16}, r"data\.window_blocks = 3: the checkpoint was trained with 16"),
    ],
)
def test_a_state_of_another_order_is_refused(folders, change, message):
    loader = DataLoader(config_of(folders[:1], training__seq_len=4), 0, 1)
    with pytest.raises(DataError, match=message):
        loader.load_state_dict(loader.state_dict() | change)
    loader.close()


def test_an_outage_while_a_window_was_read_ahead_is_over_when_it_is_opened(folders, monkeypatch):
    """What could not be read then is asked for again."""
    split = open_dataset(str(folders[0])).split("train")
    read, asked = Split.read, []

    def read_or_fail(split, block):
        asked.append(block)
        if len(asked) in (WINDOW + 1, WINDOW + 3):
            raise StoreError("the store is away")
        return read(split, block)

    with ThreadPoolExecutor(1) as readers:
        sound, stream = (Stream(split, "name", readers, seed=0, window_blocks=WINDOW) for _ in range(2))
        expected = sound.read(0, split.total_tokens)[0].tolist()
        readers.submit(int).result()
        monkeypatch.setattr(Split, "read", read_or_fail)
        stream.read(0, 1)
        readers.submit(int).result()
        assert len(asked) == 2 * WINDOW
        assert stream.read(0, split.total_tokens)[0].tolist() == expected


def test_close_ends_the_threads(folders):
    before = set(threading.enumerate())
    with closing(DataLoader(config_of(folders, training__seq_len=4), 0, 1)) as loader:
        loader.next_step()
        own = set(threading.enumerate()) - before
    assert {thread.name.partition("_")[0] for thread in own} == {"prefetch", "reader"}
    assert not any(thread.is_alive() for thread in own)


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize(("dp_size", "max_samples"), [(1, 0), (3, 0), (2, 1), (3, 7), (5, 1000)])
def test_validation_takes_samples_evenly_from_all_held_out_text(folders, dp_size, max_samples):
    """0: all, so every held-out pair of input and label once; any number of ranks gives equally many batches."""
    sizes = {"training__seq_len": 6, "training__local_batch_size": 4, "data__mask_documents": True}
    config = config_of(folders, **sizes, validation__max_samples=max_samples)
    every = []
    for folder in folders:
        documents = chain.from_iterable(stored_blocks(folder, "validation"))
        stream = [pair for document in documents for pair in enumerate(document)]
        every += [stream[first : first + 7] for first in range(0, len(stream) - 1, 6)]
    chosen = min(len(every), max_samples or len(every))
    expected = [every[i * len(every) // chosen] for i in range(chosen)]

    ranks = [list(validation_batches(config, rank, dp_size)) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {-(-chosen // (4 * dp_size))}
    rows = []
    for batch in chain.from_iterable(zip(*ranks, strict=True)):
        assert batch.tokens.shape == (4, 6)
        rows += zip(*(field.tolist() for field in batch), strict=True)
    for (tokens, labels, positions), part in zip_longest(rows, expected, fillvalue=[]):
        pairs = [pair for pair in zip(tokens, labels, strict=True) if pair[1] != IGNORED]
        assert pairs == list(pairwise(token for _, token in part))
        assert positions[: len(part[:6])] == positions_in_sample(part[:6])


@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1])
def test_the_largest_ids_of_uint16_and_uint32_arrive_as_they_are(tmp_path, vocab_size):
    folder = write_dataset(tmp_path / "set", [[[vocab_size - 1, 1, 0]] * 3], vocab_size=vocab_size)
    with closing(DataLoader(data_config(folder, training__seq_len=6), 0, 1)) as loader:
        assert loader.next_step()[0].tokens[0].tolist() == [vocab_size - 1, 1, 0] * 2
