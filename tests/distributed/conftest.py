"""Fixtures of tests that train."""

import random

import pytest

from data.prepare import main as prepare
from tests.runs import SMALL


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """150 documents of a made-up language, with a tokenizer of 512. The text is beside it."""
    folder = tmp_path_factory.mktemp("data")
    words = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    (folder / "text").mkdir()
    for i in range(150):
        text = " ".join("".join(words.choices(syllables, k=words.randint(1, 3))) for _ in range(words.randint(20, 400)))
        (folder / "text" / f"{i:03}.txt").write_text(text)
    prepare(
        [f"--source={folder / 'text'}", f"--output={folder / 'set'}", "--vocab-size=512", "--validation-fraction=0.1"]
    )
    return folder / "set"


@pytest.fixture(scope="session")
def small(dataset):
    """The arguments of a small run on `dataset`."""
    return (*SMALL, f"--data.datasets={dataset}")
