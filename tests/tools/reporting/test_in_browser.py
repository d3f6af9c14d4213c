"""The page in a real browser: each figure is drawn, nothing is asked for, complained of, or wider than the page."""

import json

import pytest

from tests.tools.reporting import browser as browsers
from tests.tools.reporting.runs import end_event, eval_event, folders_of_images, start, train_event, trained, written
from tools.report import main

pytestmark = pytest.mark.skipif(browsers.PROGRAM is None, reason="no chromium and no google-chrome on the PATH")

# Each figure's id, the size of its drawing in pixels, and how many things are drawn in it.
DRAWN = """[...document.querySelectorAll(".plot")].map(node => {
  const drawing = node.querySelector(".main-svg");
  const box = drawing ? drawing.getBoundingClientRect() : {width: 0, height: 0};
  const things = [...node.querySelectorAll(".lines path, .points path, .heatmaplayer image")];
  const seen = things.filter(thing => {
    const place = thing.getBoundingClientRect();
    return Math.max(place.width, place.height) > 1 && getComputedStyle(thing).visibility !== "hidden";
  });
  return [node.id, box.width, box.height, seen.length];
})"""


@pytest.fixture(scope="module")
def browser():
    with browsers.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory, _one_thread):
    """Report of a run on images whose names, and whose folder, hold HTML; with an average, and with gaps."""
    place = tmp_path_factory.mktemp("images")
    data = ("data.source=folder", f"data.root={folders_of_images(place)}", "model.classes=3")
    folder = trained(place / "<img src=x onerror=alert(2)> & ç", *data, "average.step_decay=0.5", "log.every_steps=1")
    assert main([str(folder), "--images", "8"]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    events = [event for n in range(1, 9) for event in (train_event(6 * n), eval_event(6 * n, n / 10))]
    first = written(place / "<b>first", [*events, end_event(48, 30.0)])
    second = written(place / "second", events[:5], overrides=["batch.global=48"])
    assert main([str(first), str(second), "--output", str(place / "report.html")]) == 0
    return place / "report.html"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_every_figure_of_a_run_is_drawn_in_silence(browser, report, width, scheme):
    page = browser.open(report, width, scheme=scheme)
    drawn = {key[len("plot-") :]: rest for key, *rest in page.value(DRAWN)}
    expected = {"loss", "top1", "lr", "norms", "pace", "mfu", "data_wait", "trust", "layers", "time", "confusion"}
    assert set(drawn) == expected
    for key, (across, down, things) in drawn.items():
        assert 200 < across <= width and down > 100 and things, (key, across, down, things)
    check_silence(page, report)
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("[...document.images].every(image => image.complete && image.naturalWidth >= 64)")
    dark = page.value("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(20, 23, 26)") == (scheme == "dark")


def test_the_lines_move_when_steps_or_time_are_asked_for(browser, report):
    page = browser.open(report)
    last = {}
    for over in ("epoch", "step", "time", "epoch"):
        page.value(f"document.querySelector('input[value={over}]').click()")
        last[over] = page.value("document.getElementById('plot-loss').data[0].x.at(-1)")
        title = page.value("document.querySelector('#plot-loss .xtitle').textContent")
        assert title.startswith(over)
    assert last["step"] == last["epoch"] == 8, "24 images are an epoch of one step"
    assert 0 < last["time"] != 8
    check_silence(page, report)


def test_a_comparison_is_drawn_in_silence_with_a_colour_for_each_run(browser, comparison):
    page = browser.open(comparison)
    drawn = page.value(DRAWN)
    assert len(drawn) >= 9 and all(across > 200 and down > 100 and things for _, across, down, things in drawn), drawn
    assert page.value("[...document.querySelectorAll('#plot-loss .legendtext')].map(text => text.textContent)") == [
        "<b>first",
        "second",
    ]
    check_silence(page, comparison)


def test_on_paper_figures_fit_and_what_is_for_the_screen_is_gone(browser, report):
    """A4 is 794 pixels wide at 96 to the inch; with margins of a centimetre 718 are left."""
    page = browser.open(report, 718, scheme="dark", media="print")
    page.value("window.dispatchEvent(new Event('beforeprint'))")
    assert page.value("document.documentElement.scrollWidth") <= 718
    assert page.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    widths = {across for _, across, _, _ in page.value(DRAWN)}
    assert widths == {660}


# Each of them would leave a mark in `window`, one when it is clicked at.
ATTACKS = (
    "<script>window.struck=1</script>",
    "</script><script>window.struck=2</script>",
    "<img src=x onerror=window.struck=3>",
    "<svg onload=window.struck=4>",
    '"><body onload="window.struck=5">',
    "' onmouseover='window.struck=6",
    "<a href='javascript:window.struck=7'>here</a>",
    "</style></title><iframe srcdoc='<script>parent.struck=8</script>'>",
    "${window.struck=9}{{window.struck=9}}%{customdata}&lt;script&gt;",
)
# What is in the page that the page's own code would not put there; and what a click on each link would do.
FOREIGN = """[...document.querySelectorAll("*")].filter(each =>
    ["IFRAME", "OBJECT", "EMBED", "BASE", "FORM"].includes(each.tagName)
    || [...each.attributes].some(({name}) => name.startsWith("on"))
    || [each.getAttribute("href"), each.getAttribute("xlink:href")].some(to => to && !/^(#|data:)/.test(to))
    || each.tagName === "SCRIPT" && each.textContent.startsWith("window.struck")).map(each => each.outerHTML)"""


# Points at the first point of each figure; how many then show a label.
HOVERED = """[...document.querySelectorAll(".plot")].filter(plot => {
    Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: plot.data[0].z ? [0, 0] : 0}]);
    return plot.querySelector(".hovertext, .axistext");
}).length"""


def test_markup_in_names_metrics_and_notes_is_inert(browser, tmp_path):
    """In the report of one run and in a comparison: also where the pointer shows what lies behind a point."""
    folders = []
    for attacks in (ATTACKS[:5], ATTACKS[5:]):  # a folder's name has no room for all
        attack = " ".join(attacks)
        trust = {f"{layer}.{each}": 0.01 for layer, each in enumerate(attacks)}
        events = [train_event(6 * n, trust=trust, **{attack: attack}) for n in range(1, 9)]
        events += [eval_event(48, file=attack), {"event": attack, "step": 48}, end_event(48, 30.0)]
        notes = dict.fromkeys(("started", "revision", "python", "torch", "cpus", attack), attack)
        starts = [start(**notes, command=list(attacks), devices=list(attacks))]
        root = f"data.root={json.dumps(attack)}"
        folders.append(written(tmp_path / attack.replace("/", "∕"), events, [root], starts))
    both = tmp_path / "both.html"
    assert main([*map(str, folders), "--output", str(both)]) == 0
    assert all(main([str(folder), "--images", "0"]) == 0 for folder in folders)
    for path in (both, *(folder / "report.html" for folder in folders)):
        page = browser.open(path)
        assert page.value(HOVERED) > 5
        assert page.value("window.struck") is None
        assert page.value(FOREIGN) == []
        assert "window.struck" in page.value("document.body.innerText")
        check_silence(page, path)


def check_silence(page, path):
    """No word on the console, no question but for the file itself: images that lie within it are no questions."""
    assert page.complaints == []
    assert {address for address in page.requests if not address.startswith("data:")} == {path.resolve().as_uri()}


def test_the_checks_would_notice(browser, report, tmp_path):
    """A page that asks for a picture elsewhere and complains of it is found out: or the tests above could not fail."""
    page = report.read_text().replace("default-src 'none'; img-src data:", "img-src *").replace("&#x27;", "'")
    broken = tmp_path / "broken.html"
    asking = '<img src="http://127.0.0.1:9/x.png"><script>console.warn("w")</script>'
    broken.write_text(page.replace("</main>", f"{asking}{''.join(ATTACKS[3:8])}</main>"))
    opened = browser.open(broken)
    with pytest.raises(AssertionError):
        check_silence(opened, broken)
    assert "w" in opened.complaints and "http://127.0.0.1:9/x.png" in opened.requests
    assert opened.value("window.struck") is not None
    assert len(opened.value(FOREIGN)) > 2
