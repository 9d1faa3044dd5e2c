"""The page of a recording: what it states, against a recording made by hand; that it needs nothing else."""

import html.parser
import json
import re

import pytest

from jaxferry.modes import Mode
from jaxferry.plan.records import LayerPlan, Plan
from jaxferry.recording import RecordedTask, Recording
from jaxferry.report.page import bottleneck, bytes_by_link, report_page, seconds_by_stage
from jaxferry.schedule import Kind, Lane

MIB = 2**20


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
    tasks = tuple(one_step(0) + one_step(1))
    return Recording("a & b", {"name": "a box"}, 2, plan, tasks, ((0.0, 5 * MIB), (4.0, MIB)))


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


def test_work_is_added_up_by_stage_and_micro_batch(recording):
    seconds = seconds_by_stage(recording)
    assert (seconds["backward", 0], seconds["backward", 1]) == (3.0, 4.0)
    assert seconds["forward", 0] == seconds["forward", 1] == 2.0


def test_bytes_are_added_up_by_link(recording):
    moved = bytes_by_link(recording)
    assert moved == {
        (Lane.H2D, "load"): 3 * MIB,
        (Lane.GPU, "backward"): MIB,
        (Lane.D2H, "offload"): 2 * MIB,
    }


def test_the_bottleneck_is_the_busiest_lane(recording):
    assert bottleneck(recording) == "The bottleneck is the GPU: its programs take 58% of the time."


def test_the_page_is_whole_and_asks_the_network_for_nothing(recording):
    page = report_page(recording)
    reader = read(page)
    assert not {tag for tag, _ in reader.seen} & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"https?:|url\(|@import|src=", page)
    assert "@media print" in page and 'name="viewport"' in page


def test_the_page_states_tables_and_draws_each_task_of_the_last_step(recording):
    reader = read(report_page(recording))
    words = " ".join(reader.texts)
    for text in ("a & b on a box", "micro-batch 1", "4.00 s", "3.00 MiB", "GFGB", "<h>", "The bottleneck is the GPU"):
        assert text in words
    bars = [attributes for tag, attributes in reader.seen if tag == "rect" and attributes["height"] == "20"]
    assert sorted(bar["class"] for bar in bars) == ["backward", "forward", "load", "offload", "update"]
    widths = {bar["class"]: float(bar["width"]) for bar in bars}
    assert widths["backward"] == pytest.approx(2 * widths["forward"], rel=1e-3)


def test_the_speed_of_a_link_is_its_bytes_by_its_time(recording):
    page = report_page(recording)
    [section] = re.findall(r"<h2>Speed of the links</h2>.*?</section>", page)
    [most] = [float(text) for text in re.findall(r">([\d.e-]+) GB/s<", section)]
    assert most == pytest.approx(3 * MIB / 1e9, rel=0.01)


def test_the_command_writes_the_page(jaxferry, recording, tmp_path):
    recording.save(tmp_path / "run.json")
    result = jaxferry("report", tmp_path / "run.json", "-o", tmp_path / "report.html")
    assert (result.status, result.out.strip()) == (0, bottleneck(recording))
    assert (tmp_path / "report.html").read_text() == report_page(recording)
    assert json.loads(jaxferry("report", tmp_path / "run.json", "--json").out) == recording.to_json()


def test_bad_input_is_one_line(refused, recording, tmp_path):
    recording.save(tmp_path / "run.json")
    assert "--plot draws a bench" in refused("report", tmp_path / "run.json", "--plot", tmp_path / "p.png")
    assert "cannot write" in refused("report", tmp_path / "run.json", "-o", tmp_path / "none" / "r.html")
    (tmp_path / "other.json").write_text("{}")
    assert "-o makes a page of a recording" in refused("report", tmp_path / "other.json", "-o", tmp_path / "r.html")
