"""What is made of saved reports: ratios, pictures, pages."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from paged_loadtest.compare import compare, differences
from paged_loadtest.plot.series import make_series
from paged_loadtest.results import Report, ServerSample, summarise
from paged_loadtest.timeline import Timeline
from PIL import Image

from paged_backend.cli import main


def timeline(ttft_s=0.1, gap_s=0.01, tokens=5, cached=0):
    arrivals = [ttft_s + gap_s * number for number in range(tokens)]
    return Timeline(0.0, arrivals, 10, tokens, cached)


def run(label="concurrency 2", slower=1.0, concurrency=2, **more):
    timelines = [timeline(slower * 0.1 * (1 + n / 10), slower * 0.01) for n in range(8)]
    server = [ServerSample(at / 4, at / 20, 2, 1) for at in range(8)]
    return summarise(
        label,
        timelines,
        2.0 * slower,
        max_concurrency=concurrency,
        request_rate=None,
        **{"server": server, **more},
    )


def report(*runs, **config):
    environment = {"device": "a CPU <of> mine", "cores": "2", "commit": "abc", "date": str(runs)}
    settings = {"model": "paged_llm", "backend": "triton", "dataset_name": "random", **config}
    return Report("sweep", settings, environment, list(runs))


def save(report, path):
    report.save(path)
    return str(path)


def test_ratios_say_who_is_better():
    (lines,) = compare(report(run()), report(run(slower=2.0))).values()
    found = {line.name: (line.ratio, line.verdict) for line in lines}
    assert found["Output token throughput (tok/s)"] == (pytest.approx(0.5), "worse")
    assert found["TTFT median (ms)"] == (pytest.approx(2.0), "worse")
    assert "Request goodput (req/s)" not in found
    (lines,) = compare(report(run(slower=2.0)), report(run())).values()
    assert {line.verdict for line in lines if line.ratio} == {"better"}


def test_small_differences_are_none():
    (lines,) = compare(report(run()), report(run(slower=1.04))).values()
    assert {line.verdict for line in lines} == {"same"}


def test_runs_are_matched_by_label():
    levels = [run(f"concurrency {n}", concurrency=n) for n in (1, 2, 4)]
    pairs = compare(report(*levels[:2]), report(*levels[1:]))
    assert list(pairs) == ["concurrency 2"]


def test_what_differs_besides_the_figures_is_named():
    first, second = report(run(), seed=1), report(run(), seed=2, burstiness=1.0)
    assert differences(first, second) == [("seed", 1, 2), ("burstiness", None, 1.0)]


def test_compare_prints_and_names_a_file_that_holds_none(tmp_path, capsys):
    first = save(report(run(), seed=1), tmp_path / "a.json")
    second = save(report(run(slower=2.0), seed=2), tmp_path / "b.json")
    assert main(["bench", "compare", first, second]) == 0
    shown = capsys.readouterr().out
    assert "seed: 1 | 2" in shown and "worse" in shown and "2.00" in shown
    other = tmp_path / "c.json"
    other.write_text("{}")
    assert main(["bench", "compare", first, str(other)]) == 2
    assert f"{other} holds no results" in capsys.readouterr().err
    assert main(["bench", "compare", first, str(tmp_path / "d.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_compare_refuses_runs_that_have_nothing_in_common(tmp_path, capsys):
    levels = [run(f"concurrency {n}", concurrency=n) for n in (1, 2, 4, 8)]
    first = save(report(*levels[:2]), tmp_path / "a.json")
    second = save(report(*levels[2:]), tmp_path / "b.json")
    assert main(["bench", "compare", first, second]) == 2
    assert "no run in common: concurrency 1; concurrency 2 | " in capsys.readouterr().err


def test_one_report_shows_all_runs_and_several_one_level():
    levels = [run(f"concurrency {n}", concurrency=n) for n in (1, 2, 4)]
    (only,) = make_series(["a"], [report(*levels)])
    assert [drawn.name for drawn in only.drawn] == [level.label for level in levels]
    assert len({drawn.color for drawn in only.drawn}) == 3
    both = make_series(["a", "b"], [report(*levels), report(*levels[:2])])
    assert [drawn.name for s in both for drawn in s.drawn] == [
        "a, concurrency 2",
        "b, concurrency 2",
    ]
    assert both[0].color != both[1].color


class Page(HTMLParser):
    """What a page needs from elsewhere, and what it holds."""

    def __init__(self, text):
        super().__init__()
        self.needs, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.needs.append(value)
        if tag in ("script", "link", "iframe", "img"):
            self.needs.append(tag)


def drawn(tmp_path, *reports, kind):
    files = [save(r, tmp_path / f"run{number}.json") for number, r in enumerate(reports)]
    output = tmp_path / f"plot.{kind}"
    assert main(["bench", "plot", *files, "-o", str(output)]) == 0
    return output.read_bytes()


@pytest.mark.parametrize("count", [1, 2])
def test_a_page_needs_nothing_else_and_says_everything(tmp_path, count):
    levels = [run(f"concurrency {n}", slower=n, concurrency=n) for n in (1, 2, 4)]
    text = drawn(tmp_path, *[report(*levels)] * count, kind="html").decode()
    page = Page(text)
    assert page.needs == []
    assert "url(http" not in text and "@import" not in text
    assert page.tags.count("svg") == 6 and page.tags.count("table") == count
    assert "a CPU &lt;of&gt; mine" in text and "<of>" not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    for level in levels:
        assert f"<td>{level.label}</td>" in text


def test_a_picture_is_large_enough_to_be_halved(tmp_path):
    picture = Image.open(
        io.BytesIO(drawn(tmp_path, report(run(), run("concurrency 4")), kind="png"))
    )
    assert picture.width >= 1600
    colors = picture.convert("RGB").getcolors(2**24)
    assert len(colors) > 50


def test_without_samples_of_the_server_its_panels_are_left_out(tmp_path):
    page = Page(drawn(tmp_path, report(run(server=())), kind="html").decode())
    assert page.tags.count("svg") == 4


def test_reports_of_one_request_or_of_one_token_can_be_drawn(tmp_path):
    lonely = summarise(
        "all at once", [timeline(tokens=1)], 1.0, max_concurrency=None, request_rate=5.0
    )
    assert drawn(tmp_path, report(lonely), kind="png").startswith(b"\x89PNG")


def test_reports_of_prefixes_are_drawn_over_their_hits(tmp_path):
    timelines = {part: [timeline(cached=part) for _ in range(4)] for part in (0, 5, 10)}
    runs = [
        summarise(f"shared {10 * part}%", lines, 1.0, max_concurrency=1, request_rate=None)
        for part, lines in timelines.items()
    ]
    prefix = Report("prefix", {}, {}, runs)
    text = drawn(tmp_path, prefix, kind="html").decode()
    assert "TTFT against prefix-cache hits" in text and "<td>100.0%</td>" in text


@pytest.mark.parametrize(
    ("output", "message"),
    [("plot.pdf", "must end in .png or .html"), ("missing/plot.png", "cannot write")],
)
def test_outputs_that_cannot_be(tmp_path, capsys, output, message):
    file = save(report(run()), tmp_path / "a.json")
    assert main(["bench", "plot", file, "-o", str(tmp_path / output)]) == 2
    assert message in capsys.readouterr().err


def test_a_report_without_an_answer_cannot_be_drawn(tmp_path, capsys):
    failed = Timeline(0.0, error="gone")
    empty = summarise("all at once", [failed], 1.0, max_concurrency=None, request_rate=None)
    file = save(report(empty), tmp_path / "a.json")
    assert main(["bench", "plot", file, "-o", str(tmp_path / "a.png")]) == 2
    assert "nothing to draw" in capsys.readouterr().err
