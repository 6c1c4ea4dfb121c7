"""The house: imports point down, no module keeps mutable globals or reads the environment, docs have short lines."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("models", "parallel", "data", "checkpoint", "float8", "launch", "run", "storage", "tools")
OWN = {path.stem for path in ROOT.glob("*.py")} | set(PACKAGES)
# What each part may import of the project. Anything not listed (train.py and other commands) may import all but tools,
# which only tools, tests and benchmarks may.
MAY_IMPORT = {
    "config": set(),
    "storage": {"config"},
    "parallel": {"config", "storage"},
    "float8": {"config", "parallel"},
    "data": {"config", "storage"},
    "checkpoint": {"config", "data", "parallel", "storage"},
    "loss": {"config", "data", "parallel"},
    "optim": {"checkpoint", "config", "muon", "parallel"},
    "muon": {"config", "parallel"},
    "metrics": {"config", "storage"},
    "models": {"checkpoint", "config", "data", "float8", "parallel"},
    "run": {"checkpoint", "config", "data", "parallel", "storage"},
}
# Who reads or sets variables of the environment: of the launcher, of AWS, and switches of libraries.
ENVIRONMENT = {
    "run/processes.py",
    "storage/s3.py",
    "run/run.py",
    "run/exits.py",
    "run/torchrun.py",
    "data/prepare/workers.py",
    "tools/same.py",  # ranks that share a GPU
    "tools/study.py",  # gives each run its devices
    "float8/__init__.py",
    "parallel/device.py",  # the allocator of a GPU's memory, before CUDA starts
}


def sources() -> list[Path]:
    files = list(ROOT.glob("*.py"))
    for package in PACKAGES:
        files += (ROOT / package).rglob("*.py")
    return sorted(files)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(ROOT)
    part = relative.parts[0].removesuffix(".py")
    modules = set(imported(ast.parse(path.read_text())))
    own = {module.split(".")[0] for module in modules} & OWN
    if part in MAY_IMPORT:
        assert own <= MAY_IMPORT[part] | {part}
    assert part == "tools" or "tools" not in own
    if relative.name == "model.py" and part == "models":
        others = {module for module in modules if re.fullmatch(r"models\.\w+\.model", module)}
        allowed = {"torch", "math", "collections", "dataclasses", "functools", "typing"}
        outside = {m.split(".")[0] for m in modules - others} - allowed
        assert not outside, "a model file imports torch only, or another model's"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_mutable_globals(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in tree.body:
        value = getattr(node, "value", None)
        assert not isinstance(value, (ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)), ast.unparse(node)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]


def test_the_environment_is_read_in_few_places() -> None:
    found = {str(path.relative_to(ROOT)) for path in sources() if "os.environ" in path.read_text()}
    assert found <= ENVIRONMENT
    assert not [path for path in sources() if "getenv" in path.read_text()]


def test_lines_of_the_docs_are_short() -> None:
    """Tables and what is to be copied, as it is, may be wider."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == [], path.name


def module_exists(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_commands_of_the_docs_exist_and_figures_name_what_made_them() -> None:
    """A file of results is named beside its commit, or in a page that names its command, if there still is one."""
    lost = []
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        commands = re.findall(r"python -m ((?:benchmarks|tools|data|launch|run)[\w.]*)", text)
        lost += [f"{path.name}: python -m {name}" for name in commands if not module_exists(name)]
        for name in set(re.findall(r"benchmarks/results/([\w-]+\.json)\)", text)):
            found = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
            commit = found["machine"].get("commit") or "no commit"
            [command, *_] = re.findall(r"python (?:-m )?(\S+)", found["command"])
            named = command == "train.py" or (command in commands and module_exists(command))
            if commit[:7] not in text and not named:
                lost.append(f"{path.name}: {name}, made by {found['command']} at {commit[:7]}")
    assert lost == []
