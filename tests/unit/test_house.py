"""The house: imports point down, no module keeps mutable globals or reads the environment, docs have short lines."""

import ast
import json
import re
from pathlib import Path

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
    "tools/processes.py",  # NGPU, as the run script
    "tools/same.py",  # ranks that share a GPU
    "tools/study.py",  # gives each run its devices
    "float8/__init__.py",
    "parallel/device.py",  # the allocator of a GPU's memory, before CUDA starts
}


MODEL_IMPORTS = {"torch", "math", "collections", "dataclasses", "functools", "typing"}
ROOMS = "benchmarks|checkpoint|data|docs|float8|launch|models|parallel|run|storage|tests|tools|train_configs"
MADE_ELSEWHERE = {  # names that docs give as examples
    "models/palm.py",
    "data/rank-00000.json",
    "benchmarks/results/gpu-GPU.json",
}


def sources():
    files = list(ROOT.glob("*.py"))
    for package in PACKAGES:
        files += (ROOT / package).rglob("*.py")
    return sorted(files)


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def breaches(path):
    """What a file does that the house forbids."""
    text = path.read_text()
    tree = ast.parse(text)
    relative = path.relative_to(ROOT)
    part = relative.parts[0].removesuffix(".py")
    modules = set(imported(tree))
    own = {module.split(".")[0] for module in modules} & OWN
    allowed = MAY_IMPORT.get(part, OWN - {"tools"}) | {part}
    yield from (f"imports {name}" for name in own - allowed)
    if relative.match("models/*/model.py"):
        others = {module for module in modules if re.fullmatch(r"models\.\w+\.model", module)}
        outside = {module.split(".")[0] for module in modules - others} - MODEL_IMPORTS
        yield from (f"a model file that imports {name}" for name in outside)
    for node in tree.body:
        if isinstance(getattr(node, "value", None), (ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
            yield f"mutable global {ast.unparse(node)}"
    if any(isinstance(node, ast.Global) for node in ast.walk(tree)):
        yield "global"
    if "getenv" in text or ("os.environ" in text and str(relative) not in ENVIRONMENT):
        yield "reads the environment"


def test_the_code_keeps_to_the_house():
    assert [f"{path}: {breach}" for path in sources() for breach in breaches(path)] == []


def pages():
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_lines_of_the_docs_are_short():
    """Tables and what is to be copied, as it is, may be wider."""
    for path in pages():
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == [], path.name


def module_exists(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_what_launch_and_docs_name_exists():
    lost = []
    for path in (*pages(), *(ROOT / "launch").rglob("*.*"), ROOT / "launch" / "kubernetes" / "Dockerfile"):
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(rf"(?<![\w./-])((?:{ROOMS})/[\w./-]+\.(?:py|sh|toml|yaml|json|md))", text))
        lost += [f"{path.name}: {name}" for name in named - MADE_ELSEWHERE if not (ROOT / name).exists()]
        modules = re.findall(rf'-m"?,? "?((?:{ROOMS})[\w.]*\w)', text)
        lost += [f"{path.name}: python -m {name}" for name in modules if not module_exists(name)]
    assert lost == []


def test_figures_name_what_made_them():
    """A file of results is named beside its commit, or in a page that names its command, if there still is one."""
    lost = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        for name in set(re.findall(r"benchmarks/results/([\w-]+\.json)\)", text)):
            found = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
            commit = found["machine"].get("commit") or "no commit"
            [command, *_] = re.findall(r"python (?:-m )?(\S+)", found["command"])
            named = command == "train.py" or (f"python -m {command}" in text and module_exists(command))
            if commit[:7] not in text and not named:
                lost.append(f"{path.name}: {name}, made by {found['command']} at {commit[:7]}")
    assert lost == []
