"""python -m tools.preflight: a sound cluster has no faults; what is wrong is named with its rank."""

import os
import re
from unittest import mock

import pytest
import torch

from tests.harness import run_ranks
from tools import preflight
from tools.preflight import Report, find_faults, time_transfer, try_storage

SOUND = Report("a", "", {"torch": "2.13.0", "numpy": "2.0"}, 0.010, 1, 8.0)


def test_a_sound_cluster_has_no_faults():
    assert find_faults([SOUND, SOUND._replace(gemm_seconds=0.013), SOUND], 0) == []
    assert find_faults([SOUND] * 3, expect_gbits=10) == []
    assert len(find_faults([SOUND] * 3, expect_gbits=100)) == 3


def test_of_two_nodes_the_slower_link_is_a_fault():
    (fault,) = find_faults([SOUND, SOUND._replace(host="b", gbits=0.08)], 0)
    assert fault.startswith("fault: rank 1 (b): ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alike": {"torch": "2.12.0", "numpy": "2.0"}}, "torch is 2.12.0, the others have 2.13.0"),
        ({"storage_error": "s3://b: AccessDenied"}, "s3://b: AccessDenied"),
        ({"gemm_seconds": 0.020}, "a matrix product takes 20.00 ms"),
        ({"gbits": 0.8}, "0.80 Gbit/s from rank 1, wanted 8.00"),
    ],
)
def test_the_bad_rank_is_named(change, said):
    (fault,) = find_faults([SOUND, SOUND, SOUND._replace(host="b", **change)], 0)  # type: ignore[arg-type]
    assert fault.startswith("fault: rank 2 (b): ")
    assert said in fault


def transfers_by_a_clock(seconds):
    """The rates between two ranks whose transfers took so long."""
    now = [0.0]
    ticks = iter([tick for elapsed in seconds for tick in (0.0, elapsed)])

    def perf_counter():
        now[0] += next(ticks)
        return now[0]

    preflight.time = mock.Mock(perf_counter=perf_counter)
    other = 1 - int(os.environ["RANK"])
    return time_transfer(other, other, torch.device("cpu"))


def test_a_rank_that_comes_late_to_a_transfer_has_no_slow_link():
    """Nor does one count that has to connect first."""
    rates = run_ranks(2, transfers_by_a_clock, [9.0, 0.5, 0.25, 2.0, 0.5, 0.5])
    expected = 8e-9 * preflight.TRANSFER_BYTES / 0.25
    assert rates == [pytest.approx(expected)] * 2


def test_storage_that_cannot_be_written_is_a_finding(tmp_path):
    (tmp_path / "file").touch()
    found = try_storage(f"{tmp_path}/file")
    assert found.startswith(f"{tmp_path}/file")
    assert found.endswith(": Not a directory")
    assert try_storage(f"{tmp_path}/new") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_all_ranks_report(tmp_path, capfd):
    asked = [f"--storage={tmp_path}", "--expect-gbits=100000"]
    assert run_ranks(2, preflight.main, asked, start_group=False) == [1, 1]
    said = capfd.readouterr().out
    assert "ranks: 2, hosts: 1" in said
    for rank in (0, 1):
        assert re.search(rf"^fault: rank {rank} \(.*\): .* Gbit/s from rank {1 - rank},", said, re.MULTILINE)
    assert said.count("faults found: ") == 1
