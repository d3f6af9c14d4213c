"""The pages in headless chromium: each figure is drawn, nothing is complained of or requested, and
names stay text."""

import html
import json
import re
import shutil
import subprocess

import pytest

from tests.tools.reporting.runs import end_event, eval_event, start, train_event, written
from tools.report import main

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--virtual-time-budget=5000", "--window-size=500,900", "--dump-dom",
)  # fmt: skip
HOSTILE = (
    "</script><script>window.struck=1</script><img src=x onerror=window.struck=2>"
    "\"' onload='window.struck=3' & %{x}"
)
# Draws over time, points at the first value of each figure, and leaves what it finds in the
# document.
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  document.querySelector("input[value=time]").click();
  const plots = [...document.querySelectorAll(".plot")];
  for (const plot of plots) Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: plot.data[0].z ? [0, 0] : 0}]);
  const drawn = plot => [...plot.querySelectorAll(".lines path, .points path, .heatmaplayer image")]
    .filter(each => Math.max(each.getBoundingClientRect().width, each.getBoundingClientRect().height) > 1).length;
  document.body.dataset.found = JSON.stringify({
    drawn: Object.fromEntries(plots.map(plot => [plot.id.slice(5), drawn(plot)])),
    titles: [...document.querySelectorAll(".xtitle")].map(each => each.textContent),
    labels: document.querySelectorAll(".hovertext, .axistext, .hoverlayer .legend").length,
    images: [...document.images].map(image => image.naturalWidth),
    cut: [...document.querySelectorAll(".wide")].filter(each => each.scrollWidth > each.clientWidth).length,
    overflow: document.documentElement.scrollWidth - innerWidth,
    struck: window.struck || document.querySelectorAll("[onerror], [onload], iframe").length,
    text: document.body.innerText});
}, 500))</script></body>"""


def opened(path, more=""):
    """(what PROBE finds in the page, lines on the console, among them each request that the page's
    policy refuses)."""
    page = path.read_text()
    copy = path.with_name("copy.html")
    assert (
        page.count("</body>") == 1
        and "Content-Security-Policy\" content=\"default-src 'none';" in page
    )
    copy.write_text(page.replace("</body>", more + PROBE))
    command = [
        CHROMIUM,
        *SWITCHES,
        f"--user-data-dir={path.parent / 'profile'}",
        copy.resolve().as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(html.unescape(re.search('data-found="([^"]*)"', done.stdout)[1]))
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(
    "several",
    [pytest.param(False, id="run"), pytest.param(True, id="comparison", marks=pytest.mark.slow)],
)
def test_the_page_is_drawn_in_silence_and_names_are_text(tmp_path, several):
    events = [
        train_event(6 * n, trust={HOSTILE: 0.1, "b": n}, **{HOSTILE: HOSTILE}) for n in range(1, 9)
    ]
    events += [eval_event(24), eval_event(48, file=HOSTILE), end_event(48, 30.0)]
    starts = [
        start(revision=HOSTILE, python=HOSTILE, command=[HOSTILE]),
        start(step=24, devices=[HOSTILE]),
    ]
    hostile = written(
        tmp_path / HOSTILE.replace("/", "∕"),
        events,
        [f"model.init_from={json.dumps(HOSTILE)}"],
        starts,
    )
    folders = (
        [hostile, written(tmp_path / "b", events[:5], ["batch.global=48"])]
        if several
        else [hostile]
    )
    report = tmp_path / "report.html"
    assert main([*map(str, folders), "--images", "4", "--output", str(report)]) == 0
    found, console = opened(report)
    more = {"weight_norm", "gradient_norm", "update_norm"} | (set() if several else {"layers"})
    assert (
        set(found["drawn"])
        == {"loss", "top1", "lr", "images_per_second", "mfu", "data_wait", "trust"} | more
    )
    assert (
        all(found["drawn"].values())
        and set(found["titles"]) == {"time, seconds"}
        and found["labels"] > 5
    ), found
    assert found["images"] == [16] * (0 if several else 4) and found["overflow"] <= 0
    assert found["cut"] == 0, "on a narrow screen tables are whole"
    assert not found["struck"] and "window.struck" in found["text"] and console == []
    if several:  # a page that complains and requests is found out
        _, console = opened(
            report, '<img src="http://127.0.0.1:9/x"><script>console.log("w")</script>'
        )
        assert len(console) >= 2 and "127.0.0.1:9/x" in "".join(console)
