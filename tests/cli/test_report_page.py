"""The page of a recording: what it states, against a recording made by hand; that it needs nothing else."""

import dataclasses
import html.parser
import json
import re

import pytest

import browser
from jaxferry.cli.compare import Comparison, PolicyRun
from jaxferry.cli.recording import RecordedTask, Recording
from jaxferry.cli.report import Summary, bench_page, bottleneck_sentence, bytes_by_link, report_page, seconds_by_stage
from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step.records import LayerPlan, Plan
from jaxferry.step.schedule import Kind, Lane, schedule_step
from jaxferry.step.simulate.machine import steady_step_s

MIB = 2**20
TIMES = (
    "load_s",
    "forward_s",
    "forward_dha_s",
    "backward_s",
    "backward_dha_s",
    "backward_go_s",
    "offload_s",
    "update_s",
)


def task(kind, lane, start_s, end_s, step=0, num_bytes=0, layer="<h>"):
    return RecordedTask(f"{kind} {layer}", kind, layer, lane, step, step % 2, num_bytes, start_s, end_s)


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
    plan = Plan("auto", 1.0, (LayerPlan("<h>", Mode.GFGB),))
    times = {"load_s": 1.0, "forward_s": 2.0, "forward_dha_s": 9.0, "backward_s": 3.0, "backward_dha_s": 9.0}
    more = {"backward_go_s": 5.0, "offload_s": 1.0, "update_s": 1.0}
    layer = LayerProfile(name="<h>", param_bytes=3 * MIB, grad_bytes=2 * MIB, **times, **more)
    return Recording(
        model="a & b",
        machine={"name": "a box"},
        accumulate=2,
        memory_budget_bytes=6 * MIB,
        plan=plan,
        profile=Profile({}, (layer,)),
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
    """Collects tags, texts and attributes; fails if tags do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def section(page, heading):
    [found] = re.findall(rf"<section><h2>{heading}</h2>.*?</section>", page)
    return found


def test_work_is_added_up_by_stage_and_micro_batch(recording):
    seconds = seconds_by_stage(recording)
    assert (seconds["backward", 0], seconds["backward", 1]) == (3.0, 4.0)
    assert seconds["forward", 0] == seconds["forward", 1] == 2.0
    assert "micro-batch 1 (gradient boundary)" in section(report_page(recording), "Time by stage and micro-batch")


def test_bytes_are_added_up_by_link(recording):
    moved = bytes_by_link(recording)
    assert moved == {
        (Lane.H2D, "load"): 3 * MIB,
        (Lane.GPU, "backward"): MIB,
        (Lane.D2H, "offload"): 2 * MIB,
    }


def test_the_bottleneck_is_the_busiest_lane_or_the_memory_that_binds_the_plan(recording):
    assert bottleneck_sentence(recording) == "The bottleneck is the GPU: the GPU computes 58% of the time."
    details = {"binding": "memory", "unlimited_steady_step_s": 0.5, "unlimited_needed_bytes": 9 * MIB}
    bound = dataclasses.replace(recording, plan=dataclasses.replace(recording.plan, details=details))
    assert bottleneck_sentence(bound).startswith("The bottleneck is the device memory: the GPU computes 58%")
    assert "with 9.00 MiB of device memory a step would take 500.00 ms" in bottleneck_sentence(bound)


def test_the_measured_step_stands_beside_the_prediction_of_the_same_plan(recording):
    summary = Summary(recording)
    assert summary.step_s == (11.0,)  # from 6 s to 17 s, the ends of the steps' last programs
    assert summary.predicted_s == steady_step_s(schedule_step(recording.profile, recording.plan))
    words = section(report_page(recording), "Lanes of one step")
    assert words.index(">measured<") < words.index(">predicted<")
    assert "Measured: 11.00 s a step" in words and f": {summary.predicted_s:.2f} s. From" in words


def test_the_prediction_shows_what_programs_read_and_write_over_the_links(recording):
    """As loads and offloads; a recording has no such tasks."""
    (layer,) = recording.profile.layers
    given = {"forward_read_s": 4.0, "backward_read_s": 4.0, "backward_write_s": 2.0}
    profile = Profile({}, (dataclasses.replace(layer, **given),))
    plan = Plan("auto", 0.0, (LayerPlan("<h>", Mode.DHA, gradient=GradientPlace.HOST),))
    of_host = dataclasses.replace(recording, profile=profile, plan=plan)
    words = section(report_page(of_host), "Lanes of one step")
    assert "write &lt;h&gt;: 2.00 s" in words and all(stage in words for stage in ("load", "offload"))
    assert {Kind.READ, Kind.WRITE} < {task.kind for task in Summary(of_host).predicted}


def test_a_plan_without_times_has_no_prediction(recording):
    layer = LayerProfile(name="<h>", param_bytes=3, grad_bytes=2, **dict.fromkeys(TIMES, 0.0))
    page = report_page(dataclasses.replace(recording, profile=Profile({}, (layer,))))
    assert ">predicted<" not in page and "without times" in page


def test_the_page_is_whole_and_asks_the_network_for_nothing(recording, bench):
    for page in (report_page(recording), bench_page(bench)):
        reader = read(page)
        assert not {tag for tag, _ in reader.seen} & {"script", "link", "img", "iframe", "object"}
        assert not re.search(r"https?:|url\(|@import|src=", page)
        assert "@media print" in page and 'name="viewport"' in page


def test_the_page_states_tables_and_draws_each_task_of_the_last_step(recording):
    page = report_page(recording)
    words = " ".join(read(page).texts)
    for text in ("a & b on a box", "4.00 s", "3.00 MiB", "GFGB", "<h>", "memory budget 6.00 MiB", "8.00 MiB"):
        assert text in words
    rows = [attributes for tag, attributes in read(section(page, "Lanes of one step")).seen if tag == "rect"]
    top = [bar for bar in rows if float(bar["y"]) < 130]
    assert sorted(bar["class"] for bar in top) == ["backward", "forward", "load", "offload", "update"]
    widths = {bar["class"]: float(bar["width"]) for bar in top}
    assert widths["backward"] == pytest.approx(2 * widths["forward"], rel=1e-3)


def test_kinds_of_device_memory_are_drawn_on_top_of_each_other(recording):
    drawn = section(report_page(recording), "Device memory over the step, as counted")
    polygons = [attributes for tag, attributes in read(drawn).seen if tag == "polygon"]
    assert [polygon["class"] for polygon in polygons] == ["parameters", "gradients"]
    heights = [[float(point.split(",")[1]) for point in each["points"].split()] for each in polygons]
    assert min(heights[1]) < min(heights[0]) < max(heights[0])
    zero = max(heights[0])
    assert (zero - min(heights[1])) / (zero - min(heights[0])) == pytest.approx(5 / 3, rel=1e-2)


def test_the_speed_of_a_link_is_its_bytes_by_its_time(recording):
    page = report_page(recording)
    [most] = [float(text) for text in re.findall(r">([\d.e-]+) MB/s<", section(page, "Speed of the links over time"))]
    assert most == pytest.approx(3 * MIB / 1e6, rel=0.01)  # three digits are shown
    busy = [float(text) for text in re.findall(r">([\d.e-]+) GB/s<", section(page, "Bytes on the host link, by step"))]
    assert busy == pytest.approx([3 * MIB / 1e9, 2 * MIB / 1e9, 2 * MIB / 7 / 1e9], rel=0.01)


def test_a_fast_link_is_told_in_gigabytes(recording):
    tasks = tuple(dataclasses.replace(task, num_bytes=1000 * task.num_bytes) for task in recording.tasks)
    page = report_page(dataclasses.replace(recording, tasks=tasks))
    assert ">3.15 GB/s<" in section(page, "Speed of the links over time")


def test_the_command_writes_the_page(jaxferry, recording, tmp_path):
    recording.save(tmp_path / "run.json")
    result = jaxferry("report", tmp_path / "run.json", "-o", tmp_path / "report.html")
    assert (result.status, result.out.strip()) == (0, bottleneck_sentence(recording))
    assert (tmp_path / "report.html").read_text() == report_page(recording)
    assert json.loads(jaxferry("report", tmp_path / "run.json", "--json").out) == recording.to_json()


def test_a_bench_becomes_one_page_with_all_policies(jaxferry, bench, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench.to_json()))
    assert jaxferry("report", tmp_path / "bench.json", "-o", tmp_path / "report.html").status == 0
    page = (tmp_path / "report.html").read_text()
    assert page == bench_page(bench)
    assert re.findall("<h2>(.*?)</h2>", page) == ["auto", "l2l"] and page.count("<h3>Plan</h3>") == 2
    assert "2.200" in page  # measured by the bound: 11 s by 5 s


def test_bad_input_is_one_line(refused, recording, tmp_path):
    recording.save(tmp_path / "run.json")
    assert "--plot draws a bench" in refused("report", tmp_path / "run.json", "--plot", tmp_path / "p.png")
    assert "cannot write" in refused("report", tmp_path / "run.json", "-o", tmp_path / "none" / "r.html")
    (tmp_path / "other.json").write_text("{}")
    told = refused("report", tmp_path / "other.json", "-o", tmp_path / "r.html")
    assert "jaxferry.bench/1" in told and "jaxferry.recording/1" in told


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


needs_browser = pytest.mark.skipif(browser.PATH is None, reason=browser.WHY_NOT)


@needs_browser
def test_a_browser_shows_all_of_the_page_on_wide_and_narrow_screens(recording, tmp_path):
    page = report_page(recording)
    wide, narrow = browser.measure(page, (1400, 400), tmp_path)
    assert wide["width"] > 1300 and narrow["width"] <= 400
    for seen in (wide, narrow):
        assert seen["content"] <= seen["width"]  # only charts and tables scroll sideways, not the page
        assert seen["bars"] == page.count("<rect") and seen["charts"] == page.count("<svg")
        assert seen["texts"] and max(seen["texts"]) <= seen["width"]
        assert seen["cut"] == []  # no label of a chart leaves it
        assert seen["resources"] == 0


@needs_browser
def test_a_browser_prints_the_page(recording, tmp_path):
    printed = browser.print_pdf(report_page(recording), tmp_path)
    assert printed.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type /Page\b", printed)) <= 6
