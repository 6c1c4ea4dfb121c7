"""The loader against the definition of the order: exact, whatever changes between two steps."""

import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config import ConfigError
from data.loader import IGNORED, Batch, build_dataloader, validation_batches
from data.shards import DataError, open_dataset
from data.stream import Stream
from tests.corpus import data_config, expected_stream, stored_blocks, write_dataset

SEED, WINDOW = 3, 3


def corpus(rng: random.Random, tokens: range, longest: int) -> list[list[list[int]]]:
    """Two shards of documents in which every token of `tokens` occurs once; 0 ends a document."""
    documents, rest = [], list(tokens)
    while rest:
        size = rng.randint(1, longest)
        documents.append([*rest[:size], 0])
        rest = rest[size:]
    return [documents[::2], documents[1::2]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    rng = random.Random(0)
    root = tmp_path_factory.mktemp("datasets")
    ranges = (range(1, 400), range(400, 500), range(500, 1000))
    return [
        write_dataset(root / name, corpus(rng, tokens, longest), validation=corpus(rng, tokens, 9)[0])
        for name, tokens, longest in zip("abc", ranges, (25, 3, 150), strict=True)
    ]


def config_of(folders, **overrides):
    return data_config(*folders, run__seed=SEED, data__window_blocks=WINDOW, **overrides)


def global_samples(loaders, steps: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(tokens, labels, positions) of every sample that all ranks together deliver, in the global order."""
    samples = []
    for _ in range(steps):
        ranks = [loader.next_step() for loader in loaders]
        for microbatch in zip(*ranks, strict=True):
            for batch in microbatch:
                assert batch.positions is not None
                samples += zip(*(field.tolist() for field in batch), strict=True)
    return samples


def positions_in_sample(part: list[tuple[int, int]]) -> list[int]:
    """From 0 at the start of the sample and of each document in it."""
    start, positions = 0, []
    for i, (_, place_in_document) in enumerate(part):
        start = i if place_in_document == 0 else start
        positions.append(i - start)
    return positions


class Reference:
    """The same order by the plainest means: lists, generators and a cursor for each dataset."""

    def __init__(self, folders):
        self.tokens, self.cursor = {}, {}
        for folder in folders:
            stream = expected_stream(stored_blocks(folder), open_dataset(str(folder)).hash, SEED, WINDOW)
            self.tokens[folder] = list(islice(stream, 20_000))
            self.cursor[folder] = 0
        self.mixture = None

    def take(self, folders, weights, seq_len: int, count: int):
        if (folders, weights, seq_len) != self.mixture:
            self.mixture, self.taken = (folders, weights, seq_len), [0] * len(folders)
        samples = []
        for _ in range(count):
            shares = [weight / sum(weights) for weight in weights]
            chosen = min(range(len(folders)), key=lambda i: ((self.taken[i] + 0.5) / shares[i], i))
            self.taken[chosen] += 1
            folder = folders[chosen]
            part = self.tokens[folder][self.cursor[folder] : self.cursor[folder] + seq_len + 1]
            self.cursor[folder] += seq_len
            ids = [token for token, _ in part]
            samples.append((ids[:-1], ids[1:], positions_in_sample(part[:-1])))
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
        "mixture": st.sampled_from([((0,), (1.0,)), ((0, 1, 2), (5.0, 1.0, 2.0)), ((2, 1), (0.3, 0.7))]),
    }
)


@settings(max_examples=60, deadline=None)
@given(phases=st.lists(phase, min_size=1, max_size=5))
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
        loaders = [build_dataloader(config, rank, p["dp_size"]) for rank in range(p["dp_size"])]
        for loader in loaders:
            if state:
                loader.load_state_dict(json.loads(json.dumps(state)))
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


def test_every_token_is_an_input_once_per_epoch(folders):
    """From the stored files alone: whole epochs hold the corpus, each time in another order."""
    corpus_tokens = Counter(token for block in stored_blocks(folders[0]) for document in block for token in document)
    size = sum(corpus_tokens.values())
    loader = build_dataloader(config_of(folders[:1], training__seq_len=7, training__local_batch_size=5), 0, 1)
    inputs: list[int] = []
    while len(inputs) < 3 * size:
        inputs += loader.next_step()[0].tokens.flatten().tolist()
    loader.close()
    epochs = [inputs[i * size : (i + 1) * size] for i in range(3)]
    assert all(Counter(epoch) == corpus_tokens for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_another_seed_is_another_order(folders):
    orders = set()
    for seed in (0, 1):
        config = data_config(folders[0], run__seed=seed, training__seq_len=16)
        loader = build_dataloader(config, 0, 1)
        orders.add(str(loader.next_step()[0].tokens.tolist()))
        loader.close()
    assert len(orders) == 2


def test_batches_are_int64_and_positions_only_when_asked(folders):
    for mask in (False, True):
        loader = build_dataloader(config_of(folders[:1], training__seq_len=16, data__mask_documents=mask), 0, 1)
        batch = loader.next_step()[0]
        loader.close()
        assert (batch.positions is not None) == mask
        for tensor in batch:
            assert tensor is None or (tensor.dtype == torch.int64 and tensor.shape == (8, 16))


def test_state_counts_what_was_consumed_not_what_was_read_ahead(folders):
    loader = build_dataloader(config_of(folders[:1], training__seq_len=4, data__prefetch_steps=3), 0, 1)
    loader.next_step()
    assert loader.state_dict()["samples"] == 8
    loader.close()


def test_another_order_is_refused(folders):
    loader = build_dataloader(config_of(folders[:1], training__seq_len=4), 0, 1)
    state = loader.state_dict()
    with pytest.raises(DataError, match=r"run\.seed = 3: the checkpoint was trained with 4"):
        loader.load_state_dict(state | {"seed": 4})
    with pytest.raises(DataError, match=r"data\.window_blocks = 3: the checkpoint was trained with 16"):
        loader.load_state_dict(state | {"window_blocks": 16})


def test_the_next_window_is_read_ahead_across_epochs(folders):
    split = open_dataset(str(folders[0])).split("train")
    asked = []
    watched = SimpleNamespace(
        total_tokens=split.total_tokens,
        tokens=split.tokens,
        read=lambda block: asked.append(block) or split.read(block),
    )
    blocks = len(split.tokens)
    with ThreadPoolExecutor(1) as readers:
        stream = Stream(watched, "name", readers, window_blocks=WINDOW)
        stream.read(0, np.empty(1, split.dtype))
        readers.submit(int).result()
        assert len(asked) == 2 * WINDOW  # the first window and the next
        stream.read(split.total_tokens - 1, np.empty(1, split.dtype))
        readers.submit(int).result()
        last = blocks % WINDOW or WINDOW
        assert len(asked) == 3 * WINDOW + last  # the last window and the first of the next epoch
        stream.read(split.total_tokens, np.empty(1, split.dtype))
        readers.submit(int).result()
        assert len(asked) == 4 * WINDOW + last  # which was there already; and its next


def test_close_ends_the_threads(folders):
    before = threading.active_count()
    loader = build_dataloader(config_of(folders, training__seq_len=4), 0, 1)
    loader.next_step()
    assert threading.active_count() > before
    loader.close()
    while threading.active_count() > before:
        for thread in threading.enumerate():
            if thread.name.startswith(("prefetch", "window")):
                thread.join(timeout=10)
                assert not thread.is_alive()


def test_global_batch_must_divide(folders):
    with pytest.raises(ConfigError, match="global_batch_size = 7"):
        build_dataloader(config_of(folders[:1], training__global_batch_size=7, training__seq_len=4), 0, 1)


# ---------------------------------------------------------------- validation


def stream_of_validation(folder) -> list[tuple[int, int]]:
    blocks = stored_blocks(folder, "validation")
    return [(token, place) for block in blocks for document in block for place, token in enumerate(document)]


def valid_pairs(batches: list[Batch]) -> list[tuple[int, int]]:
    """(input, label) of every trained token, in order."""
    pairs = []
    for batch in batches:
        keep = batch.labels != IGNORED
        pairs += zip(batch.tokens[keep].tolist(), batch.labels[keep].tolist(), strict=True)
    return pairs


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
def test_validation_covers_every_held_out_token_at_any_dp_size(folders, dp_size):
    config = config_of(
        folders, training__seq_len=6, training__local_batch_size=4, validation__enable=True, validation__max_samples=0
    )
    ranks = [list(validation_batches(config, rank, dp_size)) for rank in range(dp_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch.tokens.shape == (4, 6) for batches in ranks for batch in batches)
    in_order = [batch for turn in zip(*ranks, strict=True) for batch in turn]
    expected = []
    for folder in folders:
        tokens = [token for token, _ in stream_of_validation(folder)]
        expected += list(pairwise(tokens))
    assert valid_pairs(in_order) == expected


def test_validation_takes_at_most_max_samples_spread_over_all(folders):
    def pairs(**overrides):
        config = config_of(folders, training__seq_len=6, training__local_batch_size=2, **overrides)
        return [valid_pairs(list(validation_batches(config, rank, 2))) for rank in range(2)]

    few = pairs(validation__max_samples=5)
    assert sum(map(len, few)) == 5 * 6
    every = [pair for rank in pairs(validation__max_samples=0) for pair in rank]
    assert {pair for rank in few for pair in rank} <= set(every)
    assert max(token for rank in few for token, _ in rank) > 500  # the last dataset is there


def test_validation_positions(folders):
    config = config_of(
        folders[:1],
        training__seq_len=6,
        training__local_batch_size=1,
        validation__max_samples=0,
        data__mask_documents=True,
    )
    stream = stream_of_validation(folders[0])
    for n, batch in enumerate(validation_batches(config, 0, 1)):
        expected = positions_in_sample(stream[n * 6 : n * 6 + 6])
        assert batch.positions[0, : len(expected)].tolist() == expected


def test_validation_without_held_out_documents(tmp_path):
    folder = write_dataset(tmp_path / "d", [[[1, 2, 3, 0]] * 20])
    with pytest.raises(DataError, match="has no validation documents"):
        next(validation_batches(data_config(folder, training__seq_len=4), 0, 1))


def test_values_survive_the_whole_range_of_both_types(tmp_path):
    """The largest ids of uint16 and uint32 vocabularies arrive as they are."""
    for vocab_size in (2**16, 2**16 + 1):
        documents = [[[vocab_size - 1, 1, 0], [vocab_size - 2, 2, 0]]]
        folder = write_dataset(tmp_path / str(vocab_size), documents, vocab_size=vocab_size)
        loader = build_dataloader(data_config(folder, training__seq_len=5, training__local_batch_size=6), 0, 1)
        seen = np.unique(loader.next_step()[0].tokens.numpy())
        loader.close()
        assert seen.tolist() == [0, 1, 2, vocab_size - 2, vocab_size - 1]
