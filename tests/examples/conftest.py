"""Data for the examples' tests."""

import random

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache for tokenizers and tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path):
    """Enough words for a tokenizer to find pairs in, with umlauts and runs of blanks."""
    words = ["Fähre", "ferry", "laden", "löschen", "    return", "the", "of", "\n"]
    file = tmp_path / "text.txt"
    file.write_text(" ".join(random.Random(0).choices(words, k=6000)))
    return file
