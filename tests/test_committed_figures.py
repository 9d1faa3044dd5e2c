"""The committed figures of the papers follow from today's planner: some of their rows, computed again."""

import importlib
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "papers"


@pytest.fixture
def papers(monkeypatch):
    """Imports a script of `benchmarks/papers` by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "papers"))
    return importlib.import_module


@pytest.mark.parametrize(("figure", "name"), [("figures_9_and_12", "BERT-base"), ("figure_13", "1.7B")])
def test_rows_of_memferry(papers, figure, name):
    script, models = papers("memferry"), papers("paper_models")
    known = {model.name: model for model in models.known_models()}
    model = known.get(name) or models.transformer_xl(float(name[:-1]), 8, script.A100_LENGTH)
    committed = json.loads((RESULTS / "memferry.json").read_text())[figure]
    rows = script.measure(model, "a100-pcie3")
    expected = [row for row in committed if row["model"] == name]
    assert [row["policy"] for row in rows] == [row["policy"] for row in expected]
    for row, before in zip(rows, expected, strict=True):
        assert row.keys() == before.keys()
        assert all(
            row[key] == (before[key] if isinstance(row[key], str) else pytest.approx(before[key])) for key in row
        )


def test_stages_of_several_gpus(papers):
    script = papers("memory_wall_gpus")
    committed = json.loads((RESULTS / "memory_wall_gpus.json").read_text())["table_2"]
    assert script.column_of(2) == pytest.approx(committed["2"])


def test_the_table_of_the_papers_is_that_of_the_committed_rows(papers):
    script = papers("readme")
    assert script.table_of(script.all_rows()) in script.PATH.read_text()
