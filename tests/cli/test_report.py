"""`jaxferry report`: the page of a recording made by hand, its reasons, and that it needs nothing else."""

import dataclasses
import html.parser
import json
import re

import pytest

import browser
from jaxferry.cli.compare import Comparison, PolicyRun
from jaxferry.cli.figures import speeds_figure
from jaxferry.cli.recording import RecordedTask, Recording
from jaxferry.cli.report import bench_page, layer_reasons, report_page
from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import make_plan
from jaxferry.step import Kind, Lane, LayerPlan, Plan, needed_bytes, schedule_step, steady_step_s
from jaxferry.units import format_seconds
from profiles import transformer

MIB = 2**20
TIMES = {"load_s": 1.0, "forward_s": 2.0, "forward_dha_s": 9.0, "backward_s": 3.0, "backward_dha_s": 9.0}
TIMES |= {"backward_go_s": 5.0, "offload_s": 1.0, "update_s": 1.0}


def task(kind, lane, start_s, end_s, step=0, num_bytes=0):
    return RecordedTask(f"{kind} <h>", kind, "<h>", lane, step, step % 2, num_bytes, start_s, end_s)


def one_step(step):
    begin = 10.0 * step
    return [
        task(Kind.LOAD, Lane.H2D, begin, begin + 1, step, 3 * MIB),
        task(Kind.FORWARD, Lane.GPU, begin + 1, begin + 3, step),
        task(Kind.BACKWARD, Lane.GPU, begin + 3, begin + 6 + step, step, MIB),
        task(Kind.OFFLOAD, Lane.D2H, begin + 7, begin + 8, step, 2 * MIB),
        task(Kind.UPDATE, Lane.HOST, begin + 8, begin + 9, step),
    ]


@pytest.fixture
def recording():
    return Recording(
        model="a & b",
        machine={"name": "a box"},
        accumulate=2,
        memory_budget_bytes=6 * MIB,
        plan=Plan("auto", 1.0, (LayerPlan("<h>", Mode.GFGB),)),
        profile=Profile({}, (LayerProfile(name="<h>", param_bytes=3 * MIB, grad_bytes=2 * MIB, **TIMES),)),
        tasks=tuple(one_step(0) + one_step(1)),
        device_bytes={"parameters": ((0.0, 0), (10.0, 3 * MIB)), "gradients": ((0.0, 0), (13.0, 2 * MIB), (18.0, 0))},
        host_bytes={"master parameters": 6 * MIB, "gradients": 2 * MIB},
    )


@pytest.fixture
def bench(recording):
    numbers = {"step_s": (11.0,), "predicted_s": 7.0, "own_bound_s": 5.0, "peak_device_bytes": 6 * MIB}
    row = PolicyRun("auto", **numbers, losses=(1.0,), measured={}, predicted={}, recording=recording)
    return Comparison({"compute": 5.0}, (row, dataclasses.replace(row, policy="l2l")))


class Reader(html.parser.HTMLParser):
    """Collects tags, texts and the titles of bars; fails if tags do not match."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts, self.titles = [], set(), [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        (self.titles if self.open[-2:] == ["g", "title"] else self.texts).append(text)


def section(page, heading):
    [found] = re.findall(rf"<section><h2>{heading}</h2>.*?</section>", page, re.DOTALL)
    return " ".join(found.split())


def test_work_and_bytes_are_added_up_by_stage_micro_batch_and_link(recording):
    seconds = recording.seconds_by_stage()
    assert (seconds["backward", 0], seconds["backward", 1]) == (3.0, 4.0)
    assert seconds["forward", 0] == seconds["forward", 1] == 2.0
    moved = {(Lane.H2D, "load"): 3 * MIB, (Lane.GPU, "backward"): MIB, (Lane.D2H, "offload"): 2 * MIB}
    assert recording.bytes_by_link() == moved
    assert "micro-batch 1 (gradient boundary)" in section(report_page(recording), "Time by stage and micro-batch")


def test_the_bottleneck_is_the_busiest_lane_or_the_memory_that_binds_the_plan(recording):
    assert recording.sentence == "The bottleneck is the GPU: the GPU computes 58% of the time."
    details = {"binding": "memory", "unlimited_steady_step_s": 0.5, "unlimited_needed_bytes": 9 * MIB}
    bound = dataclasses.replace(recording, plan=dataclasses.replace(recording.plan, details=details))
    assert bound.sentence.startswith("The bottleneck is the device memory: the GPU computes 58%")
    assert "with 9.00 MiB of device memory a step would take 500.00 ms" in bound.sentence
    for free_s in (recording.predicted_s - 1e-4, recording.predicted_s + 1.0):  # no faster, as far as is shown
        equal = dataclasses.replace(bound.plan, details=details | {"unlimited_steady_step_s": free_s})
        assert dataclasses.replace(bound, plan=equal).sentence == recording.sentence


def test_the_measured_step_stands_beside_the_prediction_of_the_same_plan(recording):
    assert recording.step_s == (11.0,)  # from 6 s to 17 s, the ends of the steps' last programs
    assert recording.predicted_s == steady_step_s(schedule_step(recording.profile, recording.plan))
    words = section(report_page(recording), "Lanes of one step")
    assert words.index(">measured<") < words.index(">predicted<")
    assert "Measured: 11.00 s a step" in words and f": {recording.predicted_s:.2f} s. From" in words


def test_the_prediction_shows_what_programs_read_and_write_over_the_links(recording):
    """As loads and offloads; a recording has no such tasks."""
    times = {"forward_read_s": 4.0, "backward_read_s": 4.0, "backward_write_s": 2.0}
    profile = Profile({}, (dataclasses.replace(recording.profile.layers[0], **times),))
    plan = Plan("auto", 0.0, (LayerPlan("<h>", Mode.DHA, gradient=GradientPlace.HOST),))
    of_host = dataclasses.replace(recording, profile=profile, plan=plan)
    words = section(report_page(of_host), "Lanes of one step")
    assert "write &lt;h&gt;: 2.00 s" in words and all(stage in words for stage in ("load", "offload"))
    assert {Kind.READ, Kind.WRITE} < {task.kind for task in of_host.predicted}


def test_a_plan_without_times_has_no_prediction(recording):
    layer = LayerProfile(name="<h>", param_bytes=3, grad_bytes=2, **dict.fromkeys(TIMES, 0.0))
    page = report_page(dataclasses.replace(recording, profile=Profile({}, (layer,))))
    assert ">predicted<" not in page and "without times" in page


def test_the_page_is_whole_and_asks_the_network_for_nothing(recording, bench):
    for page in (report_page(recording), bench_page(bench)):
        assert not Reader(page).tags & {"script", "link", "img", "iframe", "object"}
        assert not re.search(r"https?:|url\((?!#)|@import|src=", page)
        assert "@media print" in page and 'name="viewport"' in page


def test_the_page_states_tables_and_each_task_of_the_step_with_its_time_and_bytes(recording):
    page = Reader(report_page(recording))
    words = " ".join(" ".join(page.texts).split())
    for text in ("a & b on a box", "4.00 s", "3.00 MiB", "GFGB", "<h>", "memory budget 6.00 MiB", "8.00 MiB"):
        assert text in words
    assert {"load <h>: 1.00 s, 3.00 MiB", "forward <h>: 2.00 s", "backward <h>: 4.00 s, 1.00 MiB"} < set(page.titles)
    assert {"offload <h>: 1.00 s, 2.00 MiB", "update <h>: 1.00 s", "forward: 2.00 s"} < set(page.titles)


@pytest.mark.parametrize("part", ["times", "bytes", "memory"])
def test_a_recording_without_times_bytes_or_memory_has_a_page(recording, part):
    changes = {"times": {"start_s": 0.0, "end_s": 0.0}, "bytes": {"num_bytes": 0}, "memory": {}}[part]
    tasks = tuple(dataclasses.replace(task, **changes) for task in recording.tasks)
    memory = {} if part == "memory" else recording.device_bytes
    page = report_page(dataclasses.replace(recording, tasks=tasks, device_bytes=memory))
    assert page.count("<svg") == (4 if part == "bytes" else 5)


def test_the_speed_of_a_link_is_its_bytes_by_its_time(recording):
    [axes] = speeds_figure(recording).axes
    assert axes.get_ylabel() == "MB/s"
    assert max(axes.patches[0].get_data().values) == pytest.approx(3 * MIB / 1e6, rel=1e-6)
    words = section(report_page(recording), "Bytes on the host link, by step")
    busy = [float(text) for text in re.findall(r">([\d.e-]+) GB/s<", words)]
    assert busy == pytest.approx([3 * MIB / 1e9, 2 * MIB / 1e9, 2 * MIB / 7 / 1e9], rel=0.01)  # three digits are shown
    fast = tuple(dataclasses.replace(task, num_bytes=1000 * task.num_bytes) for task in recording.tasks)
    assert speeds_figure(dataclasses.replace(recording, tasks=fast)).axes[0].get_ylabel() == "GB/s"


def test_the_command_writes_the_page(jaxferry, recording, tmp_path):
    recording.save(tmp_path / "run.json")
    result = jaxferry("report", tmp_path / "run.json", "-o", tmp_path / "report.html")
    assert (result.status, result.out.strip()) == (0, recording.sentence)
    assert (tmp_path / "report.html").read_text() == report_page(recording)
    assert json.loads(jaxferry("report", tmp_path / "run.json", "--json").out) == recording.to_json()


def test_a_bench_becomes_one_page_with_all_policies(jaxferry, bench, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench.to_json()))
    result = jaxferry("report", tmp_path / "bench.json", "-o", tmp_path / "report.html")
    assert result.status == 0 and "own bound" in result.out
    page = (tmp_path / "report.html").read_text()
    assert page == bench_page(bench)
    assert re.findall("<h2>(.*?)</h2>", page) == ["auto", "l2l"] and page.count("<h3>Plan</h3>") == 2
    assert "2.200" in page  # measured by the bound: 11 s by 5 s


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 1.5),
        ("machine", []),
        ("accumulate", "x"),
        ("accumulate", 0),
        ("memory_budget_bytes", -1),
        ("tasks", []),
        ("device_bytes", {"parameters": []}),
        ("device_bytes", {"parameters": [[0.0, float("inf")]]}),
        ("device_bytes", {"parameters": [[float("nan"), 1]]}),
        ("device_bytes", {"parameters": [[-1e13, 1]]}),
        ("host_bytes", {"gradients": "x"}),
        ("host_bytes", 3),
    ],
)
def test_a_recording_with_a_value_that_cannot_be_is_refused_by_its_key(recording, key, value):
    with pytest.raises(InputError, match=key):
        Recording.from_json({**recording.to_json(), key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("policy", 3), ("step_s", []), ("step_s", [-1]), ("peak_device_bytes", float("inf"))]
)
def test_a_bench_with_a_value_that_cannot_be_is_refused_by_its_key(bench, key, value):
    document = bench.to_json()
    document["rows"][0][key] = value
    with pytest.raises(InputError, match=key):
        Comparison.from_json(document)


def test_each_layer_names_the_other_choice_that_comes_closest():
    profile = transformer(8)
    plan = make_plan(profile, "auto")
    own_s = steady_step_s(schedule_step(profile, plan))
    for number, reason in enumerate(layer_reasons(profile, plan)):
        chosen, found = plan.layers[number], []
        others = [chosen.with_mode(mode) for mode in Mode if mode is not chosen.mode]
        place = GradientPlace.HOST if chosen.gradient is GradientPlace.DEVICE else GradientPlace.DEVICE
        for other in [*others, dataclasses.replace(chosen, gradient=place)]:
            layers = (*plan.layers[:number], other, *plan.layers[number + 1 :])
            found.append(steady_step_s(schedule_step(profile, dataclasses.replace(plan, layers=layers))))
        change_s = min(found) - own_s
        if abs(change_s) > 5e-3 * own_s:  # within which steps count as equally long
            assert f"a step takes {format_seconds(abs(change_s))} {'longer' if change_s > 0 else 'less'}" in reason
        else:
            assert "takes as long" in reason


def test_a_faster_choice_beyond_the_budget_is_told_with_what_it_needs():
    profile = transformer(8)
    plan = Plan("l2l", 1.0, tuple(LayerPlan(layer.name, Mode.RELOAD) for layer in profile.layers))
    budget = needed_bytes(profile, plan)
    reasons = layer_reasons(profile, plan, budget)
    assert any(re.search(r"with \w+ a step takes .* less, but needs .* [MG]iB", reason) for reason in reasons)
    assert not any("but needs" in reason for reason in layer_reasons(profile, plan))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Mode.GFGB, "one load of 40.00 ms; reading host memory in place would add 30.00 ms"),
        (Mode.DHA, "adds 30.00 ms of compute and saves a load of 40.00 ms"),
        (Mode.DFGB, r"in place \(\+10.00 ms\)"),
        (Mode.RELOAD, "two loads of 40.00 ms"),
        (Mode.RESIDENT, "no forward waits for a load of 40.00 ms"),
    ],
)
def test_a_mode_is_told_with_its_costs(mode, words):
    profile = transformer(6)
    times = {"load_s": 0.04, "forward_s": 0.1, "forward_dha_s": 0.11, "backward_s": 0.2, "backward_dha_s": 0.22}
    layers = list(profile.layers)
    layers[2] = dataclasses.replace(layers[2], **times)
    plans = [LayerPlan(layer.name, Mode.GFGB) for layer in layers]
    plans[2] = LayerPlan(layers[2].name, mode)
    reasons = layer_reasons(dataclasses.replace(profile, layers=tuple(layers)), Plan("auto", 1.0, tuple(plans)))
    assert re.search(words, reasons[2])


needs_browser = pytest.mark.skipif(browser.PATH is None, reason=browser.WHY_NOT)


@needs_browser
def test_a_browser_shows_all_of_the_page_on_wide_and_narrow_screens(recording, tmp_path):
    page = report_page(recording)
    wide, narrow = browser.measure(page, (1400, 400), tmp_path)
    assert wide["width"] > 1300 and narrow["width"] <= 400
    for seen in (wide, narrow):
        assert seen["content"] <= seen["width"]  # only charts and tables scroll sideways, not the page
        assert seen["bars"] == page.count('class="bar"') and seen["charts"] == page.count("<svg")
        assert seen["texts"] and max(seen["texts"]) <= seen["width"]
        assert seen["cut"] == []  # no label of a chart leaves it
        assert seen["resources"] == 0


@needs_browser
def test_a_browser_prints_the_page(recording, tmp_path):
    printed = browser.print_pdf(report_page(recording), tmp_path)
    assert printed.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type /Page\b", printed)) <= 6
