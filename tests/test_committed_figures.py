"""The committed figures of the papers follow from today's planner: some of their rows, computed again."""

import importlib
import json
import pathlib
import subprocess
import sys

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


def test_bounds_and_plans_of_auto():
    name, machine = "roberta:base", "v100-pcie3"
    committed = json.loads((RESULTS.parent / "auto_gap.json").read_text())["rows"]
    expected = [row for row in committed if (row["model"], row["machine"]) == (name, machine)]
    # Tests and benchmarks both have a module `measure`, so this runs in a process of its own.
    profile = f"gap.Traced({name!r}).on({machine!r})"
    code = f"import json, auto_gap as gap; print(json.dumps(gap.rows_of({name!r}, {machine!r}, {profile})))"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True, timeout=300)
    rows = json.loads(ran.stdout.splitlines()[-1])
    assert [row["budget"] for row in rows] == [row["budget"] for row in expected]
    for row, before in zip(rows, expected, strict=True):
        keys = ("budget_bytes", "bound_s", "steady_step_s")
        assert [row[key] for key in keys] == pytest.approx([before[key] for key in keys], rel=1e-4)


def test_the_documents_state_the_committed_figures():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.parent.glob("*.json")}
    gaps = [row["gap"] for row in results["auto_gap"]["rows"] if row["budget"] != "least"]
    mean, near = sum(gaps) / len(gaps), sum(gap <= 0.05 for gap in gaps)
    assert f"in {near} of {len(gaps)}, mean {100 * mean:.1f} %, largest {100 * max(gaps):.0f} %" in text
    slow = {(row["plan"], row["memory"]): row for row in results["slow_host"]["rows"]}
    little, more, unlimited = slow["anywhere", "little"], slow["anywhere", "more"], slow["unlimited", "all"]
    over = [row["measured_over_bound"] for row in (little, more, unlimited)]
    assert "Over the proven bound {:.2f} and {:.2f} (goal: 1.1)".format(*over) in text
    assert f"without a budget {over[2]:.2f} of the compute time" in text
    assert f"{little['host_over_this']:.1f} and {more['host_over_this']:.1f} times as fast (goal: 1.4;" in text
    rows = [row for row in results["update_placement"]["host_bound"]["rows"] if "ratio" in row]
    for model, digits in (("1.5B", 1), ("13B", 2), ("70B", 2)):
        found = [row["ratio"] for row in rows if (row["model"], row["num_devices"]) == (model, 1)]
        ends = (f"{end:.{digits}f}" for end in (min(found), max(found)))
        assert f"{model} {chr(0x2013).join(ends)}" in text
    assert f"| {results['update_placement']['trained']['ratio']:.2f} |" in text
    saved = results["user_gain"]["mean_saved"]["compiled"]
    assert f"{100 * saved['recomputing']:.0f} % less, mean" in text


def test_the_table_of_the_papers_is_that_of_the_committed_rows(papers):
    script = papers("readme")
    assert script.table_of(script.all_rows()) in script.PATH.read_text()
