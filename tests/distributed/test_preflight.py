"""python -m tools.preflight: a sound cluster has no faults; what is wrong is named with its rank."""

import re

import pytest

from tests.harness import run_ranks
from tools import preflight
from tools.preflight import Report, find_faults, try_storage

SOUND = Report("a", "", {"torch": "2.13.0", "numpy": "2.0"}, 0.010, 1, 8.0)


def test_a_sound_cluster_has_no_faults():
    """Of two nodes the slower link is one."""
    assert find_faults([SOUND, SOUND._replace(gemm_seconds=0.013), SOUND], 0) == []
    assert find_faults([SOUND] * 3, expect_gbits=10) == []
    assert len(find_faults([SOUND] * 3, expect_gbits=100)) == 3
    assert len(find_faults([SOUND, SOUND._replace(gbits=0.08)], 0)) == 1


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
    (fault,) = find_faults([SOUND, SOUND, SOUND._replace(host="b", **change)], 0)
    assert fault.startswith("fault: rank 2 (b): ")
    assert said in fault


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
