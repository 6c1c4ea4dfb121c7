"""The loader against the definition of the order: exact, whatever changes between two steps."""

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise, zip_longest
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.manifest import encode_manifest
from config import ConfigError
from data.loader import IGNORED, Batch, DataLoader, validation_batches
from data.order import derive_key, permutation
from data.shards import DataError, Split, open_dataset
from data.stream import Stream
from storage import StoreError
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


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes back out of a checkpoint."""
    return json.loads(encode_manifest({"dataloader": state}))["manifest"]["dataloader"]


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


def positions_in_sample(part: list[tuple[int, int]], starts: Sequence[bool] = ()) -> list[int]:
    """From 0 at the start of the sample, of each document in it, and where `starts` says so."""
    start, positions = 0, []
    for i, ((_, place_in_document), begins) in enumerate(zip_longest(part, starts)):
        start = i if place_in_document == 0 or begins else start
        positions.append(i - start)
    return positions


def shuffled_places(folder, size: int, piece: int) -> list[int]:
    """Which token of the stream stands at each place of the order, with the pieces of every window shuffled."""
    blocks, name = stored_blocks(folder), open_dataset(str(folder)).hash
    lengths = [sum(map(len, block)) for block in blocks]
    places, begin, epoch = list(range(size)), 0, 0
    while begin < size:
        order = permutation(len(blocks), derive_key(SEED, name, epoch)).tolist()
        for window, first in enumerate(range(0, len(order), WINDOW)):
            end = begin + sum(lengths[block] for block in order[first : first + WINDOW])
            # in the window with all of its tokens and the label of the last one
            inside = [i for i in range(end // piece + 1) if begin <= i * piece and i * piece + piece < end]
            moved = permutation(len(inside), derive_key(SEED, name, epoch, window, "pieces")).tolist()
            for to, source in zip(inside, (inside[i] for i in moved), strict=True):
                places[to * piece : (to + 1) * piece] = range(source * piece, (source + 1) * piece)
            begin = end
        epoch += 1
    return places


class Reference:
    """The same order by the plainest means: lists, generators and a cursor for each dataset.

    `piece` 0: the samples are not shuffled.
    """

    def __init__(self, folders, piece: int = 0, size: int = 20_000):
        self.tokens, self.places, self.cursor = {}, {}, {}
        self.piece = piece
        for folder in folders:
            stream = expected_stream(stored_blocks(folder), open_dataset(str(folder)).hash, SEED, WINDOW)
            self.tokens[folder] = list(islice(stream, 2 * size))
            self.places[folder] = shuffled_places(folder, size, piece) if piece else list(range(size))
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
            places = range(self.cursor[folder], self.cursor[folder] + seq_len)
            self.cursor[folder] += seq_len
            tokens, source = self.tokens[folder], self.places[folder]
            part = [tokens[source[place]] for place in places]
            labels = [tokens[source[place] + 1][0] for place in places]
            starts = [self.piece > 0 and place % self.piece == 0 for place in places]
            samples.append(([token for token, _ in part], labels, positions_in_sample(part, starts)))
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


@settings(max_examples=40, deadline=None)
@given(phases=st.lists(phase, min_size=1, max_size=5), shuffle_samples=st.booleans())
def test_order_survives_every_change_between_two_steps(folders, phases, shuffle_samples):
    """World size, batches, prefetch, seq_len, weights and datasets change; the order is the reference's."""
    reference, state = Reference(folders, phases[0]["seq_len"] if shuffle_samples else 0), None
    for p in phases:
        chosen = [folders[i] for i in p["mixture"][0]]
        config = config_of(
            chosen,
            data__weights=list(p["mixture"][1]),
            data__prefetch_steps=p["prefetch_steps"],
            data__mask_documents=True,
            data__shuffle_samples=shuffle_samples,
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


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 0.7)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_mixture_goes_on_where_it_stood_whatever_order_its_datasets_have(folders, order, weights):
    """What a checkpoint stores is sorted; with equal weights two samples are due at once, and the order decides."""
    config = config_of(
        [folders[i] for i in order],
        data__weights=list(weights),
        data__mask_documents=True,
        training__seq_len=7,
        training__local_batch_size=1,
    )
    loader = DataLoader(config, 0, 1)
    expected = global_samples([loader], 20)
    loader.close()
    for stop in range(1, 6):
        before, after = DataLoader(config, 0, 1), DataLoader(config, 0, 1)
        samples = global_samples([before], stop)
        state = stored(before.state_dict())
        before.next_step()
        for loader in (before, after):  # `before` goes back
            loader.load_state_dict(state)
            assert samples + global_samples([loader], 20 - stop) == expected
            loader.close()


def test_without_weights_datasets_are_drawn_in_proportion_to_their_tokens(tmp_path):
    """900 tokens and 300: of 80 samples of 10 tokens, 60 and 20."""
    large = write_dataset(tmp_path / "large", [[[1] * 29 + [0]] * 30])
    small = write_dataset(tmp_path / "small", [[[2] * 29 + [0]] * 10])
    loader = DataLoader(config_of([small, large], training__seq_len=10, training__local_batch_size=1), 0, 1)
    rows = [row for _ in range(80) for batch in loader.next_step() for row in batch.tokens.tolist()]
    loader.close()
    assert (sum(1 in row for row in rows), sum(2 in row for row in rows)) == (60, 20)


def test_shares_are_the_same_on_every_python(folders):
    """`sum` of (0.7, 0.2, 0.1) is 0.9999999999999999 up to 3.11 and 1.0 from 3.12 on, and ties would fall otherwise."""
    weights = (0.7, 0.2, 0.1)
    loader = DataLoader(config_of(folders, data__weights=list(weights), training__seq_len=7), 0, 1)
    assert tuple(share for *_, share in loader.state_dict()["datasets"]) == weights
    loader.close()


def test_a_resume_names_the_datasets_that_begin_and_those_that_are_left(folders, caplog):
    a, b = (open_dataset(str(folder)).hash for folder in folders[:2])
    left = f"dataset {a} is dropped after 64 tokens"
    begins = f"{folders[1]} (dataset {b}) is new to this run: from its first token"
    state = None
    for chosen, expected in (([0], []), ([0], []), ([1], [left, begins]), ([1, 0], []), ([1, 0], [])):
        caplog.clear()
        loader = DataLoader(config_of([folders[i] for i in chosen], training__seq_len=4), 0, 1)
        if state:
            loader.load_state_dict(stored(state))
        loader.next_step()
        state = loader.state_dict()
        loader.close()
        assert len(caplog.messages) == len(expected)
        assert all(part in line for part, line in zip(expected, caplog.messages, strict=True))


@pytest.mark.parametrize("prefetch_steps", [0, 2])
def test_a_step_that_could_not_be_recorded_comes_again(folders, prefetch_steps):
    """Ctrl-C, say, while the ledger is written; else the state would be of another step than the batches."""
    config = config_of(folders[:1], training__seq_len=7, data__prefetch_steps=prefetch_steps, data__mask_documents=True)
    loader, again = DataLoader(config, 0, 1), DataLoader(config, 0, 1)
    loader._ledger = Mock(step=Mock(side_effect=[None, KeyboardInterrupt, None, None]))
    expected = global_samples([again], 3)
    samples = global_samples([loader], 1)
    with pytest.raises(KeyboardInterrupt):
        loader.next_step()
    assert samples + global_samples([loader], 2) == expected
    assert loader.state_dict() == again.state_dict()
    loader.close()
    again.close()


def test_every_token_is_an_input_once_per_epoch(folders):
    """From the stored files alone: whole epochs hold the corpus, each time in another order."""
    corpus_tokens = Counter(token for block in stored_blocks(folders[0]) for document in block for token in document)
    size = sum(corpus_tokens.values())
    loader = DataLoader(config_of(folders[:1], training__seq_len=7, training__local_batch_size=5), 0, 1)
    inputs: list[int] = []
    while len(inputs) < 3 * size:
        inputs += loader.next_step()[0].tokens.flatten().tolist()
    loader.close()
    epochs = [inputs[i * size : (i + 1) * size] for i in range(3)]
    assert all(Counter(epoch) == corpus_tokens for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("later_seq_len", [7, 3, 20])
def test_shuffled_samples_hold_every_token_with_its_label_once_per_epoch(folders, later_seq_len):
    """Each pair of input and label is as often there as in the unshuffled stream, also after a change of seq_len."""
    tokens = Reference(folders[:1]).tokens[folders[0]]
    size = open_dataset(str(folders[0])).split("train").total_tokens
    pairs: list[tuple[int, int]] = []
    state = None
    for seq_len, steps in ((7, 4), (later_seq_len, 3 * size // later_seq_len)):
        config = config_of(
            folders[:1], training__seq_len=seq_len, training__local_batch_size=1, data__shuffle_samples=True
        )
        loader = DataLoader(config, 0, 1)
        if state:
            loader.load_state_dict(state)
        for _ in range(steps):
            batch = loader.next_step()[0]
            pairs += zip(batch.tokens[0].tolist(), batch.labels[0].tolist(), strict=True)
        state = loader.state_dict()
        loader.close()
    stream = list(pairwise(token for token, _ in tokens[: 3 * size + 1]))
    for epoch in range(2):
        part = slice(epoch * size, (epoch + 1) * size)
        assert Counter(pairs[part]) == Counter(stream[part])
        assert pairs[part] != stream[part]


def test_a_shuffled_sample_is_consecutive_tokens_of_the_stream(folders):
    """As long as seq_len is that of the beginning; and neighbours in the stream are spread."""
    samples = {}
    for shuffle in (False, True):
        config = config_of(folders[:1], training__seq_len=4, data__shuffle_samples=shuffle)
        loader = DataLoader(config, 0, 1)
        samples[shuffle] = [row for _ in range(20) for row in loader.next_step()[0].tokens.tolist()]
        loader.close()
    whole = open_dataset(str(folders[0])).split("train").total_tokens // 4  # samples of the first epoch
    place = {tuple(sample): i for i, sample in enumerate(samples[False][:whole])}
    order = [place[tuple(sample)] for sample in samples[True][:whole]]
    assert sorted(order) == list(range(whole))
    assert sum(b == a + 1 for a, b in pairwise(order)) < len(order) / 4


def test_another_seed_is_another_order(folders):
    orders = set()
    for seed in (0, 1):
        config = data_config(folders[0], run__seed=seed, training__seq_len=16)
        loader = DataLoader(config, 0, 1)
        orders.add(str(loader.next_step()[0].tokens.tolist()))
        loader.close()
    assert len(orders) == 2


def test_batches_are_int64_and_positions_only_when_asked(folders):
    for mask in (False, True):
        loader = DataLoader(config_of(folders[:1], training__seq_len=16, data__mask_documents=mask), 0, 1)
        batch = loader.next_step()[0]
        loader.close()
        assert (batch.positions is not None) == mask
        for tensor in batch:
            assert tensor is None or (tensor.dtype == torch.int64 and tensor.shape == (8, 16))


def test_state_counts_what_was_consumed_not_what_was_read_ahead(folders):
    loader = DataLoader(config_of(folders[:1], training__seq_len=4, data__prefetch_steps=3), 0, 1)
    loader.next_step()
    assert loader.state_dict()["samples"] == 8
    loader.close()


def test_another_order_is_refused(folders):
    loader = DataLoader(config_of(folders[:1], training__seq_len=4), 0, 1)
    state = loader.state_dict()
    with pytest.raises(DataError, match=r"data state: version 2; this code reads version 3, without; resume at commit"):
        loader.load_state_dict(state | {"version": 2})
    with pytest.raises(DataError, match=r"run\.seed = 3: the checkpoint was trained with 4"):
        loader.load_state_dict(state | {"seed": 4})
    with pytest.raises(DataError, match=r"data\.window_blocks = 3: the checkpoint was trained with 16"):
        loader.load_state_dict(state | {"window_blocks": 16})
    with pytest.raises(DataError, match=r"data\.shuffle_samples = false: the checkpoint was trained with true"):
        loader.load_state_dict(state | {"piece_tokens": 4})


def test_the_next_window_is_read_ahead_across_epochs(folders):
    split = open_dataset(str(folders[0])).split("train")
    asked = []
    watched = SimpleNamespace(
        total_tokens=split.total_tokens,
        tokens=split.tokens,
        packed_seq_len=0,
        read=lambda block: asked.append(block) or split.read(block),
    )
    blocks = len(split.tokens)
    with ThreadPoolExecutor(1) as readers:
        stream = Stream(watched, "name", readers, seed=0, window_blocks=WINDOW)
        stream.read(0, 1)
        readers.submit(int).result()
        assert len(asked) == 2 * WINDOW  # the first window and the next
        stream.read(split.total_tokens - 1, 1)
        readers.submit(int).result()
        last = blocks % WINDOW or WINDOW
        assert len(asked) == 3 * WINDOW + last  # the last window and the first of the next epoch
        stream.read(split.total_tokens, 1)
        readers.submit(int).result()
        assert len(asked) == 4 * WINDOW + last  # which was there already; and its next


def test_an_outage_while_a_window_was_read_ahead_is_over_when_it_is_opened(folders):
    """What could not be read then is asked for again; what cannot be read now is raised."""
    split = open_dataset(str(folders[0])).split("train")
    asked, away = [], set()

    def read(block):
        asked.append(block)
        if len(asked) in away:
            raise StoreError(f"request {len(asked)}: the store is away")
        return split.read(block)

    watched = SimpleNamespace(total_tokens=split.total_tokens, tokens=split.tokens, packed_seq_len=0, read=read)
    with ThreadPoolExecutor(1) as readers:
        stream, sound = (Stream(of, "name", readers, seed=0, window_blocks=WINDOW) for of in (watched, split))
        expected, *_ = sound.read(0, split.total_tokens)
        away |= {WINDOW + 1, WINDOW + 3}  # of the second window, read ahead
        stream.read(0, 1)
        readers.submit(int).result()
        assert len(asked) == 2 * WINDOW
        tokens, *_ = stream.read(0, split.total_tokens)
        assert tokens.tolist() == expected.tolist()
        readers.submit(int).result()
        assert len(asked) == len(split.tokens) + WINDOW + WINDOW  # a window again, and the first of the next epoch
        away.update(range(1000))
        with pytest.raises(StoreError, match=f"request {len(asked) + 1}: the store is away"):
            stream.read(0, split.total_tokens)


def test_close_ends_the_threads(folders):
    before = set(threading.enumerate())
    loader = DataLoader(config_of(folders, training__seq_len=4), 0, 1)
    loader.next_step()
    own = set(threading.enumerate()) - before
    assert {thread.name.partition("_")[0] for thread in own} == {"prefetch", "reader"}
    loader.close()
    assert not any(thread.is_alive() for thread in own)


def test_global_batch_must_divide(folders):
    with pytest.raises(ConfigError, match="global_batch_size = 7"):
        DataLoader(config_of(folders[:1], training__global_batch_size=7, training__seq_len=4), 0, 1)


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


def validation_reads(
    monkeypatch, tokens: Sequence[int], dp_rank: int, dp_size: int, **overrides
) -> Iterator[list[tuple[int, int]]]:
    """(stream, first token) of the samples in each batch of a rank, from streams of so many held-out tokens."""
    reads = []

    def stream(split, *_, **__):
        def read(start, count):
            reads.append((split.number, start))
            return np.zeros(count, np.uint16), [count], []

        return SimpleNamespace(read=read)

    def dataset(url, _):
        split = SimpleNamespace(number=int(url), total_tokens=tokens[int(url)])
        return SimpleNamespace(hash=url, split=lambda _: split)

    monkeypatch.setattr("data.loader.Stream", stream)
    monkeypatch.setattr("data.loader.open_dataset", dataset)
    config = data_config(*map(str, range(len(tokens))), **overrides)
    for _ in validation_batches(config, dp_rank, dp_size):
        yield list(reads)
        reads.clear()


@pytest.mark.parametrize("tokens", [[23], [2], [50, 0, 1, 2, 6, 7, 8, 0, 31, 0], [0, 1, 601, 5]])
@pytest.mark.parametrize("max_samples", [0, 1, 4, 7, 1000])
def test_validation_chooses_evenly_from_the_samples_of_all_streams(monkeypatch, tokens, max_samples):
    seq_len, size, dp_size = 6, 2, 3
    every = [(i, start) for i, count in enumerate(tokens) for start in range(0, max(count - 1, 0), seq_len)]
    chosen = min(len(every), max_samples or len(every))
    spread = [every[i * len(every) // chosen] for i in range(chosen)]
    for rank in range(dp_size):
        expected = [
            spread[first + rank * size : first + rank * size + size] for first in range(0, chosen, size * dp_size)
        ]
        overrides = {"training__seq_len": seq_len, "training__local_batch_size": size}
        reads = validation_reads(monkeypatch, tokens, rank, dp_size, validation__max_samples=max_samples, **overrides)
        assert list(reads) == expected


def test_validation_reads_only_the_blocks_of_the_samples_it_takes(monkeypatch, tmp_path):
    documents = [[*range(1, 20), 0]] * 40
    folder = write_dataset(tmp_path / "d", [documents], validation=documents, block_tokens=20)
    read, original = [], Split.read
    monkeypatch.setattr(Split, "read", lambda self, block: read.append(block) or original(self, block))
    sizes = {"training__seq_len": 20, "training__local_batch_size": 2, "validation__max_samples": 3}
    assert len(list(validation_batches(data_config(folder, **sizes), 0, 1))) == 2
    assert sorted(read) == [0, 1, 13, 14, 26, 27]  # the label of a sample's last token is in the next block


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
        loader = DataLoader(data_config(folder, training__seq_len=5, training__local_batch_size=6), 0, 1)
        seen = np.unique(loader.next_step()[0].tokens.numpy())
        loader.close()
        assert seen.tolist() == [0, 1, 2, vocab_size - 2, vocab_size - 1]
