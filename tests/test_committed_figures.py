"""The committed figures of the papers follow from today's planner: some of their rows, computed again."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from slowly import slow, slow_cases

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "papers"


@pytest.fixture
def papers(monkeypatch):
    """Imports a script of `benchmarks/papers` by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "papers"))
    return importlib.import_module


@pytest.mark.parametrize(("figure", "name"), [("figures_9_and_12", "BERT-base"), *slow_cases(("figure_13", "1.7B"))])
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


@pytest.mark.parametrize("titles", [("tight",), *slow(("least", "tight", "middle", "machine"))])
def test_bounds_and_plans_of_auto(titles):
    name, machine = "gpt2:medium", "h200-pcie5"
    committed = json.loads((RESULTS.parent / "auto_gap.json").read_text())["rows"]
    of_model = [row for row in committed if (row["model"], row["machine"]) == (name, machine)]
    expected = [row for row in of_model if row["budget"] in titles]
    # Tests and benchmarks both have a module `measure`, so this runs in a process of its own.
    profile = f"gap.Traced({name!r}).on({machine!r})"
    code = f"import json, auto_gap as gap; print(json.dumps(gap.rows_of({name!r}, {machine!r}, {profile}, {titles})))"
    command = [sys.executable, "-c", code]
    options = {"cwd": ROOT / "benchmarks", "env": {**os.environ, "JAX_PLATFORMS": "cpu"}, "timeout": 300}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    rows = json.loads(ran.stdout.splitlines()[-1])
    assert [row["budget"] for row in rows] == [row["budget"] for row in expected]
    for row, before in zip(rows, expected, strict=True):
        keys = ("budget_bytes", "bound_s", "steady_step_s")
        assert [row[key] for key in keys] == pytest.approx([before[key] for key in keys], rel=1e-4)


def ends(values, digits):
    """The smallest and the largest value, as the documents write a range."""
    return "\N{EN DASH}".join(f"{end:.{digits}f}" for end in (min(values), max(values)))


def steps_over_plain(rows, names):
    steps = {row["contender"]: row["step_s"] for row in rows if "step_s" in row}
    return [steps[name] / steps["plain"] for name in names]


def figures_of(results):
    """What `docs/benchmarks.md` states for the JSON of each link."""
    h200 = {name.removeprefix("gpu/h200/"): found for name, found in results.items()}
    sums, cudnn = (h200[f"steps_gpt2_medium_{name}"]["rows"] for name in ("sums", "cudnn_arrivals"))
    by_xla = steps_over_plain(sums, ("native-overlapped", "exact", "auto-all-memory"))
    by_cudnn = steps_over_plain(cudnn, ("l2l", "native-overlapped", "auto-all-memory"))
    llama = h200["steps_llama_3b_cudnn"]["rows"]
    peak = {row["contender"]: row["peak_device_bytes"] / 2**30 for row in llama}
    peaks = [row["allocator_peak_bytes"] / row["budget_bytes"] for row in results["gpu/budgets_124m"]["rows"]]
    [counted] = {
        f"{plan['counted_peak_bytes'] / plan['compiled_peak_bytes']:.4f}"
        for model in results["compiled_for_gpu"]["models"]
        for plan in model["plans"]
    }
    saved = results["user_gain"]["mean_saved"]["compiled"]
    gaps = [row["gap"] for row in results["auto_gap"]["rows"] if row["budget"] != "least"]
    blocks = [
        row["processor_s"]
        for row in results["planner_scale"]["models"]
        if (row["blocks"], row["granularity"], row["jitter"]) == (128, "block", 0)
    ]
    thousand = [row["processor_s"] for row in results["planner_scale"]["plans"] if row["layers"] == 1000]
    predicted = [row["measured_over_predicted"] for row in results["overlap"]["rows"]]
    issuing = [
        1e3 * point["issuing_s_a_segment"]
        for point in results["issue"]["points"]
        if (point["transport"], point["merges"], point["cores"]) == ("ferry", False, "one")
    ]
    large = [row for row in results["host_step"]["rows"] if row["num_parameters"] in (10**7, 10**8)]
    over = {key: [row[f"over_{key}"] for row in large] for key in ("memory", "optax", "deepspeed")}
    kills = results["process_kills"]
    return {
        "gpu/h200/steps_gpt2_medium_sums": ", ".join(f"{ratio:.3f}" for ratio in by_xla),
        "gpu/h200/steps_gpt2_medium_cudnn_arrivals": ", ".join(f"{ratio:.2f}" for ratio in by_cudnn),
        "gpu/h200/steps_llama_3b_cudnn": "{:.3f}; {:.1f} and {:.1f} GiB".format(
            *steps_over_plain(llama, ("auto",)), peak["auto"], peak["plain"]
        ),
        "gpu/budgets_124m": ends(peaks, 2),
        "compiled_for_gpu": counted,
        "user_gain": f"{100 * saved['recomputing']:.0f} %, {100 * saved['both_recomputing']:.0f} %",
        "auto_gap": f"{sum(gap <= 0.05 for gap in gaps)} of {len(gaps)} plans; {100 * sum(gaps) / len(gaps):.1f} %",
        "planner_scale": f"{ends(blocks, 1)} s; {ends(thousand, 1)} s",
        "overlap": ends(predicted, 2),
        "engine_overhead": f"{results['engine_overhead']['step_ratio']:.2f}",
        "issue": f"{ends(issuing, 2)} ms",
        "host_step": f"{ends(over['memory'], 2)}, {ends(over['optax'], 1)}, {ends(over['deepspeed'], 1)}",
        "process_kills": "{} lost; {losses} of {losses}".format(
            kills["saves_lost"], losses=kills["losses_with_equal_bits"]
        ),
    }


def test_the_table_of_benchmarks_states_the_committed_figures():
    table = (ROOT / "docs" / "benchmarks.md").read_text().split("## More")[0]
    links = re.findall(r"\[([^\[\]]+)\]\([^()]*/blob/main/benchmarks/results/([^()]+)\.json\)", table)
    stated = {name: figure for figure, name in links}
    results = {name: json.loads((RESULTS.parent / f"{name}.json").read_text()) for name in stated}
    assert stated == figures_of(results)


def test_the_table_of_the_papers_is_that_of_the_committed_rows(papers):
    script = papers("readme")
    assert script.table_of(script.all_rows()) in script.PATH.read_text()
