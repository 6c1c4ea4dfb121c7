"""Checkpoints on a real S3 server, and behind a proxy that makes it misbehave."""

import os

import pytest
import torch

from storage import OutageError, open_store
from storage.s3 import S3Store
from tests.distributed.checkpoint_kills import survive_kills
from tests.distributed.checkpoint_runs import Run, same, steps_in

# Short waits, so that what is never answered is soon given up.
WAITS = {"retry_seconds": 20, "interval": 1, "keep": 2}
IMPATIENT = {**WAITS, "retry_seconds": 1}


def store_at(url):
    store = open_store(url, 20)
    assert isinstance(store, S3Store)
    return store


@pytest.fixture
def two_steps(bucket):
    """A bucket with checkpoints of step 1 and 2."""
    Run(bucket, **WAITS).train(0, 2)
    return bucket


def test_killed_at_random_moments_of_saves(bucket):
    kills = int(os.environ.get("KILLS", "3"))
    assert survive_kills(bucket, kills, "sync") >= kills // 6  # kills between saves prove nothing


# ---------------------------------------------------------------- requests that fail


def test_passing_faults_are_survived(bucket, proxy):
    """About half of the requests fail, in bursts of two; the result is as if none had."""
    straight = Run(bucket + "/straight", interval=100)
    straight.train(0, 3)
    faults = {"cut": "get|list", "empty": "put|get", "reset_after": "put|get|list|delete"}
    faults |= dict.fromkeys(("503", "500", "404", "409", "reset"), ".*")
    for number, (fault, operation) in enumerate(faults.items()):
        proxy.fault(fault, operation, skip=2 * number, times=2)
    run = Run(bucket + "/run", **WAITS)
    run.train(0, 2)
    resumed = Run(bucket + "/run", seed=3, **WAITS)
    assert resumed.checkpoint.load() == 2
    resumed.train(2, 3)
    assert same(resumed.everything(), straight.everything()) == []
    assert [fault for fault in faults if not proxy.counts()[f"fault:{fault}"]] == []


def test_a_store_that_cannot_be_reached_is_no_reason_to_fall_back(two_steps, proxy):
    """Falling back is for damage: an outage must not cost steps."""
    proxy.fault("404", "get", key="distcp")
    with pytest.raises(OutageError, match="tried for"):
        Run(two_steps, **IMPATIENT).checkpoint.load()
    proxy.reset()
    assert Run(two_steps, **WAITS).checkpoint.load() == 2


def test_an_empty_answer_is_no_empty_folder(two_steps, proxy):
    """A run that believed it would begin anew."""
    proxy.fault("empty", "list", times=2)
    assert Run(two_steps, **WAITS).checkpoint.load() == 2
    assert proxy.counts()["fault:empty"] == 2


def test_a_lost_answer_to_the_commit_is_harmless(bucket, proxy):
    """The manifest was written, the answers got lost: the save fails, the checkpoint is there, and whole."""
    proxy.fault("reset_after", "put", key="MANIFEST")
    run = Run(bucket, **IMPATIENT)
    with pytest.raises(OutageError):
        run.train(0, 1)
    proxy.reset()
    resumed = Run(bucket, seed=3, **WAITS)
    assert resumed.checkpoint.load() == 1
    assert torch.equal(resumed.model.head.weight, run.model.head.weight)


def test_removal_takes_the_manifest_first_and_its_failure_stops_no_run(two_steps, proxy, caplog):
    proxy.fault("403", "delete", skip=1)
    run = Run(two_steps, **WAITS)
    run.checkpoint.load()
    run.train(2, 3)
    assert caplog.text.count("old checkpoints could not be removed: ") == 1
    assert steps_in(two_steps) == [3, 2]
    left = {name.partition("/")[0] for name in store_at(two_steps).sizes()} - {".lease"}
    assert len(left) == 3
