"""One pass over the data by jobs of 4, 2, 3 and 8 processes (under torchrun: test_train.py)."""

from collections import Counter
from itertools import islice

from config import to_toml
from data.shards import open_dataset
from tests.corpus import data_config, expected_stream, stored_blocks, write_dataset
from tests.distributed.data_walk import walk
from tests.harness import run_ranks
from tools.audit import prove


def test_each_token_once_over_jobs_of_4_2_3_and_8_processes(tmp_path):
    documents = [[*range(17 * i + 1, 17 * i + 17), 0] for i in range(58)]
    dataset = write_dataset(tmp_path / "dataset", [documents[:30], documents[30:]])
    run = tmp_path / "run"
    run.mkdir()
    samples = []
    jobs = ((4, 5, 1, 2), (2, 3, 3, 1), (3, 3, 2, 2), (8, 2, 1, 1))  # processes, steps, local batch, accumulation
    for processes, steps, local_batch_size, accumulation in jobs:
        config = data_config(
            dataset,
            training__seq_len=10,
            training__local_batch_size=local_batch_size,
            training__global_batch_size=processes * local_batch_size * accumulation,
            data__window_blocks=2,
        )
        (run / "config.toml").write_text(to_toml(config))
        given = run_ranks(processes, walk, run, steps, config)
        for turn in zip(*given, strict=True):  # a step: of each rank, its microbatches
            for microbatch in zip(*turn, strict=True):
                samples += [row for batch in microbatch for row in batch]
    tokens = [token for row in samples for token in row]
    assert len(samples) == 40 + 18 + 36 + 16
    stream = expected_stream(stored_blocks(dataset), open_dataset(str(dataset)).hash, 0, 2)
    assert tokens == [token for token, _ in islice(stream, len(tokens))]
    corpus = Counter(token for document in documents for token in document)
    assert len(tokens) > corpus.total() == 986  # goes on into the second epoch
    assert Counter(tokens[:986]) == corpus
    assert prove(run)[0].endswith("on [2, 3, 4, 8] data-parallel ranks")
