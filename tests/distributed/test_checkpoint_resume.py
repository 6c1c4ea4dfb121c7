"""Resume: the same bits at the same world size, the same state at any other."""

from tests.distributed.checkpoint_runs import load_run, same, train_run
from tests.harness import run_ranks


def test_any_mesh_loads_what_any_mesh_wrote(tmp_path):
    """13 rows do not divide by any of them. At its own world size and back: test_checkpoint_meshes.py."""
    written = run_ranks(3, train_run, str(tmp_path), (3,), 0, 2, {"interval": 100})[0]
    for ranks, mesh in ((1, ()), (2, (2,)), (4, (2, 2))):
        for step, loaded in run_ranks(ranks, load_run, str(tmp_path), mesh):
            assert step == 2
            assert same(loaded, written) == ["random"]  # that is restored at the same world size only
