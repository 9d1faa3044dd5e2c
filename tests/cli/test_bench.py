"""`jaxferry bench`, trained and dry, and its report."""

import dataclasses
import json
import re
import weakref

import optax
import pytest

import jaxferry as package
from jaxferry.cli.compare import Comparison, PolicyRun, compare_policies, works_s
from jaxferry.cli.workload import call_model
from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.records import read_json
from jaxferry.step import Lane

NAMES = ["zero-offload", "native-overlapped", "exact"]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Keeps no measurements of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXFERRY_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def policies(*names):
    return [word for name in names for word in ("--policy", name)]


def test_a_bench_holds_measured_and_predicted_steps_and_is_reported_again(jaxferry, user_model, tmp_path):
    path, picture, page = tmp_path / "bench.json", tmp_path / "lanes.png", tmp_path / "report.html"
    short = (*policies(*NAMES), "--steps", 4, "--rounds", 2)
    result = jaxferry("bench", "--model", user_model("functions"), *short, "-o", path, "--json")
    assert result.status == 0, result.err
    document = json.loads(result.out)
    assert read_json(path) == document
    assert [row["policy"] for row in document["rows"]] == NAMES
    assert set(document["work_s"]) == {"compute", "upload", "download", "update"}
    for row in document["rows"]:
        assert len(row["step_s"]) == 2 * 3
        assert row["measured_over_predicted"] == pytest.approx(row["measured_s"] / row["predicted_s"])
        assert row["measured_over_bound"] == pytest.approx(row["measured_s"] / document["bound_s"])
        assert row["peak_device_bytes"] > 0
        assert set(row["measured"]) == {lane.value for lane in Lane if lane is not Lane.DISK}  # which nothing uses
        for which in ("measured", "predicted"):
            assert all(start <= end for bars in row[which].values() for start, end in bars)
            assert len(row[which]["GPU"]) >= 2 * 7
    losses = [row["losses"] for row in document["rows"]]
    assert len(losses[0]) == 4 * 3
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)  # products in host memory may be summed in another order

    result = jaxferry("report", path, "--plot", picture, "-o", page)
    assert result.status == 0
    assert re.findall("<h2>(.*?)</h2>", page.read_text()) == NAMES
    assert page.read_text().count(">predicted<") == 1 + 3  # a column of the table, and a chart each
    assert "native-overlapped" in result.out and "own bound" in result.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(jaxferry("report", path, "--json").out)["rows"] == document["rows"]


@pytest.fixture
def measured(jaxferry, user_model, tmp_path):
    path = tmp_path / "measured.json"
    result = jaxferry("profile", "--model", user_model("shapes"), "--remat", "none", "-o", path)
    assert result.status == 0, result.err
    return path


@pytest.fixture
def dry(jaxferry, user_model):
    """Runs `bench --dry` on a model of shapes, which cannot be trained; returns its rows."""

    def run(*options):
        result = jaxferry("bench", "--dry", "--model", user_model("shapes"), *options, "--json")
        assert result.status == 0, result.err
        return json.loads(result.out)["rows"]

    return run


def test_a_dry_run_shows_the_plans_that_plan_shows_also_within_a_budget(jaxferry, dry, measured, tmp_path):
    path = tmp_path / "dry.json"
    rows = dry("--profile", measured, *policies("memferry", "l2l", "auto"), "-o", path)
    assert [row["policy"] for row in rows] == ["memferry", "l2l", "auto"]
    assert read_json(path)["rows"] == rows and read_json(path)["work_s"] == works_s(Profile.load(measured))
    for row in rows:
        assert row["plan"] == json.loads(jaxferry("plan", measured, "--policy", row["policy"], "--json").out)
        assert row["own_bound_s"] <= row["plan"]["predicted"]["steady_step_s"]
        assert sum(row["modes"].values()) == 4
    limits = ("--policy", "auto", "--memory-budget", rows[0]["peak_device_bytes"])
    [row] = dry("--profile", measured, *limits)
    assert row["plan"] == json.loads(jaxferry("plan", measured, *limits, "--json").out)
    assert row["peak_device_bytes"] <= rows[0]["peak_device_bytes"]


def test_a_dry_run_says_which_plan_the_budget_has_changed(jaxferry, user_model, dry, measured):
    given = ("--profile", measured, *policies("zero-offload", "exact"))
    changed, chosen = dry(*given, "--memory-budget", 26000)
    assert changed["changed_by_budget"] and changed["modes"]["RELOAD"] and changed["peak_device_bytes"] <= 26000
    assert not chosen["changed_by_budget"]
    shown = jaxferry("bench", "--dry", "--model", user_model("shapes"), *given, "--memory-budget", 26000).out
    assert shown.count("(changed to fit)") == 1
    assert not dry(*given)[0]["changed_by_budget"]


def test_a_profile_for_another_remat_is_said_to_be_one(jaxferry, user_model, measured):
    given = ("bench", "--dry", "--model", user_model("shapes"), "--profile", measured, "--policy", "exact")
    assert jaxferry(*given).err == ""
    said = jaxferry(*given, "--remat", "full").err
    assert "measured.json is for --remat none, and this bench has --remat full" in said


def test_a_dry_run_measures_where_no_profile_is_given_and_says_what_does_not_fit(jaxferry, user_model, dry):
    [row] = dry("--policy", "exact", "--memory-budget", 1000)
    assert not row["fits"] and row["smallest_budget_bytes"] > 1000
    given = ("bench", "--dry", "--model", user_model("shapes"), "--policy", "exact")
    assert "needs" in jaxferry(*given, "--memory-budget", 1000).out
    shown = jaxferry(*given).out
    assert "policies, not trained" in shown and "own bound" in shown and re.search(r"\d (DHA|DFGB|GFGB)", shown)


def test_a_ratio_below_one_to_a_bound_is_explained():
    def row(policy, own_bound_s):
        return PolicyRun(policy, (2.0,), 2.0, own_bound_s, 1, (0.5,), {}, {})

    lines = Comparison({"update": 3.0, "compute": 1.0}, (row("exact", 2.5), row("auto", 1.5))).lines()
    assert any("below the own bound: exact 0.800. No step can be: the machine was busier" in line for line in lines)
    assert any("below the bound: auto, whose plan does not move" in line for line in lines)
    assert len(Comparison({"compute": 2.0}, (row("exact", 2.0),)).lines()) == len(lines) - 2


def test_one_at_a_time_holds_one_state(user_model):
    user = call_model(user_model("arrays"))
    profile = package.train_step(user.loss_fn, optax.sgd(0.1)).measure(user.params, user.batch)
    alive, most, order = set(), 0, []

    def new_state(step):
        nonlocal most
        state = step.init(user.params)
        alive.add(id(state))
        weakref.finalize(state, alive.discard, id(state))
        most = max(most, len(alive))
        return state

    def make_step(policy):
        return package.train_step(user.loss_fn, optax.sgd(0.1), policy=policy, profile=profile, record_steps=4)

    options = {"num_steps": 4, "num_rounds": 2, "one_at_a_time": True, "report": lambda *part: order.append(part)}
    compared = compare_policies(("zero-offload", "l2l"), profile, make_step, new_state, user.batch, **options)
    assert most == 1
    assert order == [("zero-offload", n, 6) for n in range(3)] + [("l2l", n, 6) for n in range(3, 6)]
    assert [len(row.step_s) for row in compared.rows] == [6, 6]
    assert Comparison.from_json(compared.to_json()).rows == compared.rows
    with pytest.raises(InputError, match="at least 4 steps and 1 round, got 3 and 1"):
        compare_policies((), profile, make_step, new_state, user.batch, num_steps=3, num_rounds=1)


def test_the_work_of_tied_layers_counts_each_load_and_update_once(profile):
    known = Profile.load(profile)
    tied = (*known.layers[:-1], dataclasses.replace(known.layers[-1], parameters=known.layers[0].parameters))
    works = works_s(Profile(known.machine, tied))
    assert works["upload"] == pytest.approx(sum(layer.load_s for layer in known.layers[:-1]))
    assert works["download"] == pytest.approx(sum(layer.offload_s for layer in known.layers))
