"""Resume: the same bits at the same world size, the same state at any other."""

from types import SimpleNamespace

import torch

from tests.distributed.checkpoint_runs import Run, load_run, same, train_run
from tests.harness import run_ranks


def test_any_mesh_loads_what_any_mesh_wrote(tmp_path):
    """13 rows do not divide by any of them. At its own world size and back: test_checkpoint_meshes.py."""
    written = run_ranks(3, train_run, str(tmp_path), (3,), 0, 2, {"interval": 100})[0]
    for ranks, mesh in ((1, ()), (2, (2,)), (4, (2, 2))):
        for step, loaded in run_ranks(ranks, load_run, str(tmp_path), mesh):
            assert step == 2
            assert same(loaded, written) == ["random"]  # that is restored at the same world size only


def test_an_accelerators_random_state_is_kept_where_the_weights_are_on_the_host(tmp_path, monkeypatch):
    """As with parallelism.cpu_offload; a generator of the host stands for the accelerator's."""
    run, generator = Run(tmp_path), torch.Generator()
    run.checkpoint.allocate_state = lambda: None  # AdamW of torch asks for the accelerator
    device = SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    run.checkpoint.load()
    run.checkpoint.save(1)
    expected = torch.rand(4, generator=generator)
    assert run.checkpoint.load() == 1
    assert torch.equal(torch.rand(4, generator=generator), expected)
