"""Edits of a fork in all layouts: a few as the suite has time for, all by `python -m benchmarks.edits`."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.edits import EDITS

ROOT = Path(__file__).parents[2]
# Refused, or honoured by code that calls what was edited.
SOME = (
    "a layer's own attention",
    "a logit cap in forward",
    "AdamW with a double step",
    "a norm in no plan",
)


def test_edits_are_honoured_refused_or_shown():
    command = [sys.executable, "-m", "benchmarks.edits", "--quick", "--check", "--only", *SOME]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


def test_every_edit_is_of_text_that_is_there():
    for name, edit in EDITS.items():
        text = (ROOT / edit.file).read_text()
        for old, _ in edit.changes:
            assert text.count(old) == 1, (name, old)


def test_the_examples_of_the_docs_are_edits():
    page = (ROOT / "docs" / "forking.md").read_text()
    examples = re.findall(r"^```python edit: ([^\n]*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    for name, code in examples:
        assert any(code.strip() in new for _, new in EDITS[name].changes), name
