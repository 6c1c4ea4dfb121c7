"""A resume with every setting changed that may change. A new setting is changed too, by its type alone."""

import json
from contextlib import suppress
from typing import Annotated, Literal, get_args, get_origin

import msgspec

from config import KINDS, ParameterGroup, flatten, from_dict, load_config, to_toml
from tests.runs import call, read, rows

FIXED = {  # setting → why this resume keeps it
    "run.folder": "names the run",
    "run.seed": "another order of the data",
    "data.window_blocks": "another order of the data",
    **{key: "another model" for key in KINDS if key.startswith("model.")},
    "checkpoint.enable": "without it nothing is resumed",
    "checkpoint.folder": "the checkpoints are there",
    "checkpoint.branch_from": "only for a new run",
    "optimizer.name": "the checkpoint holds AdamW's means",
    "optimizer.momentum": "only Muon has one",
    "lr_scheduler.schedule": "another would leave those of this one without effect",
    "activation_checkpoint.memory_budget": "only in mode budget",
    "failures.bad_step_budget": "not with on_bad_step stop",
    **{
        f"parallelism.{name}": "one rank"
        for name in (
            "outer_lr",
            "outer_momentum",
            "cp_method",
            "pp_schedule",
            "pp_microbatch_size",
            "pp_stages_per_rank",
        )
    },
    "parallelism.dp_replicate": "one rank",
    "parallelism.cp": "one rank",
    "parallelism.tp": "one rank",
    "parallelism.pp": "one rank",
    "parallelism.local_steps": "needs replicas",
    "parallelism.reshard_group_size": "needs more ranks",
    "parallelism.cpu_offload": "not with Muon",
    "failures.on_bad_step": "rollback needs torchrun",
    "metrics.wandb_project": "needs the package wandb",
    "training.epochs": "sets training.steps",
    "validation.answers": "needs validation, which is switched off",
    "profiling.memory_snapshot": "needs CUDA",
}


def another(kind, value):
    """A value of the type, near `value` but not it."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(base) is Literal:
        return next(choice for choice in get_args(base) if choice != value)
    if get_origin(base) is tuple:
        (item,) = {*get_args(base)} - {...}
        return (*value, another(item, value[-1] if value else 0))
    if base is ParameterGroup:
        return {"pattern": "tok_embeddings.weight", "weight_decay": 0.0}
    if base is bool:
        return not value
    if base is str:
        return f"{value}x"
    for number in (value * 2 or 1, value / 2, value + 1):
        with suppress(msgspec.ValidationError):
            if base(number) != value:
                return msgspec.convert(base(number), kind)
    raise AssertionError(f"{kind}: no other value than {value} found")


def test_a_run_is_resumed_with_every_setting_changed_that_may_change(small, dataset, tmp_path):
    """What a start records is JSON, and each change is a line of the log."""
    folder = tmp_path / "run"
    arguments = [*small, f"--run.folder={folder}", "--training.steps=2"]
    assert call(tmp_path, *arguments).returncode == 0
    (tmp_path / "again").symlink_to(dataset)
    chosen = {  # where the type alone does not tell
        "data.datasets": (str(tmp_path / "again"),),
        "data.weights": (2.0,),
        "training.steps": 4,
        "training.seq_len": 64,
        "training.global_batch_size": "8 @ 0, 4 @ 512",
        "training.param_dtype": "bfloat16",
        "parallelism.dp_shard": 1,
        "compile.backend": "eager",
        "lr_scheduler.warmup_steps": 1,
        "activation_checkpoint.mode": "selective",
        "float8.skip": ("output", "wq"),
        "float8.always": ("wk",),
        "checkpoint.initial_load": str(tmp_path / "nowhere"),
        "validation.datasets": (str(tmp_path / "again"),),
        "metrics.hook": "json:dumps",
        "profiling.trace_start": 3,
        "profiling.trace_steps": 1,
        "failures.spike_sigmas": 100.0,
    }
    first = load_config(arguments)
    values = msgspec.to_builtins(first)
    for key in KINDS.keys() - FIXED.keys():
        section, name = key.split(".")
        if key in chosen:
            values[section][name] = chosen[key]
        else:
            values[section][name] = another(KINDS[key], values[section][name])
    values["model"] = {name: value for name, value in values["model"].items() if value is not None}
    second = from_dict(values)
    (tmp_path / "changed.toml").write_text(to_toml(second))

    ended = call(tmp_path, str(tmp_path / "changed.toml"))
    assert ended.returncode == 0, ended.stderr
    assert [*rows(folder)] == [1, 2, 3, 4]
    expected = {}
    for key in KINDS.keys() - FIXED.keys():
        expected[key] = json.loads(json.dumps([flatten(first)[key], flatten(second)[key]]))
        assert f"resume: {key} was " in ended.stderr
    assert read(folder, "starts.jsonl")[-1]["changed"] == expected
    for line in (
        "training.steps was 2, is now 4",
        'training.param_dtype was "float32", is now "bfloat16"',
        'optimizer.groups was [], is now [{pattern = "tok_embeddings.weight", weight_decay = 0.0}]',
    ):
        assert f"resume: {line}\n" in ended.stderr
    assert load_config([str(folder / "config.toml")]) == second
