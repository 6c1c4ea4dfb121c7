"""A resume with settings of every section changed."""

import json

from config import flatten, load_config
from tests.runs import call, read, rows


def test_a_run_is_resumed_with_settings_of_every_section_changed(small, dataset, tmp_path):
    """What a start records is JSON, and each change is a line of the log."""
    folder = tmp_path / "run"
    arguments = [*small, f"--run.folder={folder}", "--training.steps=2"]
    assert call(tmp_path, *arguments).returncode == 0
    (tmp_path / "again").symlink_to(dataset)
    changed = {
        "run.deterministic": "true",
        "data.datasets": tmp_path / "again",
        "data.weights": "2.0",
        "data.mask_documents": "true",
        "training.steps": 4,
        "training.seq_len": 64,
        "training.global_batch_size": "8 @ 0, 4 @ 512",
        "training.param_dtype": "bfloat16",
        "training.loss_chunks": 2,
        "optimizer.lr": 2e-3,
        "optimizer.state_dtype": "bfloat16",
        "optimizer.groups": '[{pattern = "tok_embeddings.weight", weight_decay = 0.0}]',
        "lr_scheduler.min_lr_factor": 0.2,
        "parallelism.reshard_after_forward": "false",
        "compile.enable": "true",
        "compile.backend": "eager",
        "activation_checkpoint.mode": "selective",
        "float8.enable": "true",
        "float8.filter": "all",
        "float8.skip": "output,wq",
        "checkpoint.interval": 1,
        "checkpoint.mode": "async",
        "validation.datasets": tmp_path / "again",
        "metrics.hook": "json:dumps",
        "profiling.trace": "true",
        "profiling.trace_start": 3,
        "profiling.trace_steps": 1,
        "failures.on_bad_step": "skip",
        "failures.spike_sigmas": 100.0,
        "comm.train_timeout_seconds": 99,
    }
    again = [*arguments, *(f"--{key}={value}" for key, value in changed.items())]
    ended = call(tmp_path, *again)
    assert ended.returncode == 0, ended.stderr
    assert [*rows(folder)] == [1, 2, 3, 4]
    first, second = (flatten(load_config(words)) for words in (arguments, again))
    expected = {key: json.loads(json.dumps([first[key], second[key]])) for key in changed}
    assert read(folder, "starts.jsonl")[-1]["changed"] == expected
    for key in changed:
        assert f"resume: {key} was " in ended.stderr
    for line in (
        "training.steps was 2, is now 4",
        'training.param_dtype was "float32", is now "bfloat16"',
        'optimizer.groups was [], is now [{pattern = "tok_embeddings.weight", weight_decay = 0.0}]',
    ):
        assert f"resume: {line}\n" in ended.stderr
