"""python -m tools.report: one page per run or comparison, whole in itself, made of whatever the folder still has."""

import html.parser
import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tools.reporting.runs import end_event, eval_event, start, train_event, trained, written
from tools.report import main

FINISHED = [train_event(6), eval_event(6), train_event(12), eval_event(12, 0.75), end_event(12, 6.0, 0.75)]


class Seen(html.parser.HTMLParser):
    """Results of a browser's parser: text outside of scripts and styles, tags, and the values of their attributes."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.references, self.handlers, self._inside = [], [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self._inside = tag
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text.append(data)


def seen(path):
    return Seen(path.read_text(encoding="utf-8"))


def drawn(path):
    """The figures in a page; their data holds no `<`, which could end its element."""
    data = path.read_text(encoding="utf-8").split('id="figures">')[1].split("</script>")[0]
    assert "<" not in data
    return json.loads(data)["figures"]


@pytest.fixture
def command(capsys):
    """command(*arguments): exit code, lines of stdout, lines of stderr."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory, _one_thread):
    """Two epochs of four updates each, with an average."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    return trained(folder, "average.step_decay=0.5", "batch.global=359", "batch.micro=359", "log.every_steps=1")


def test_a_run_becomes_a_page_in_its_folder_that_needs_nothing_else(run, command):
    """Every address in it lies in itself, and the policy forbids every other."""
    code, lines, errors = command(run, "--images", "6", "--json")
    assert (code, errors) == (0, [])
    assert lines[0].startswith(f"{run}/report.html: a run, finished at step 8, ")
    summary = json.loads(lines[-1])
    end = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert summary["files"] == [str(run / "report.html")]
    (figures,) = summary["runs"]
    assert all(figures[key] == end[key] for key in ("top1", "top5", "best_top1", "seconds"))
    assert figures["step_average"] == end["step_average"]["top1"]
    assert figures["scored"]["top1"] == end["top1"] and figures["images_shown"] == 6
    page = seen(run / "report.html")
    assert page.tags.count("img") == 6 + min(6, figures["scored"]["missed"])
    assert page.references and all(re.match("#|data:", reference) for reference in page.references)
    assert page.handlers == []
    assert "default-src 'none'" in (run / "report.html").read_text().replace("&#x27;", "'")
    text = " ".join(page.text)
    top1 = f"{100 * end['top1']:.2f} %"
    for part in ("quickstart", top1, "359 = 359 micro x 1 accumulation x 1 replica", "Images seen"):
        assert part in text


def test_without_images_none_are_in_it_and_a_wrong_folder_is_refused_before_torch_is_loaded(run, tmp_path, command):
    command(run, "--images", "0", "--output", tmp_path / "r.html")
    assert seen(tmp_path / "r.html").tags.count("img") == 0
    script = "import sys; from tools.report import main; print(main(['nowhere']), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2", "False"]


def test_runs_are_compared_in_the_current_folder(tmp_path, command, monkeypatch):
    """Runs of other lengths and batches, one of them cut off; both folders are called alike."""
    first = written(tmp_path / "a" / "run", FINISHED)
    second = written(tmp_path / "b" / "run", [train_event(6)], overrides=["batch.global=48"])
    monkeypatch.chdir(tmp_path)
    code, lines, _ = command(first, second, "--json")
    summary = json.loads(lines[-1])
    assert code == 0 and summary["files"] == ["report.html"]
    found = [(each["name"], each["state"], each["global_batch"]) for each in summary["runs"]]
    assert found == [("a/run", "finished", 24), ("b/run", "cut off", 48)]
    text = " ".join(seen(tmp_path / "report.html").text)
    assert "batch.global" in text and "a/run" in text and "optimizer.momentum" not in text


PARTS = {
    "none": [],
    "train": [train_event(6)],
    "eval": [eval_event(6)],
    "null": [train_event(6, loss=None, gradient_norm=None, lr=None, images_per_second=None, seconds=None)],
    "bare": [{"event": "train", "step": 3, "epoch": 0.1}],
    "checkpoint": [{"event": "checkpoint", "step": 3, "file": "x"}],
    "end": [end_event(3, 1.0)],
}


@pytest.mark.parametrize("events", PARTS.values(), ids=PARTS)
def test_whatever_there_is_of_a_run_makes_a_page(tmp_path, command, events):
    folder = written(tmp_path / "run", events)
    other = written(tmp_path / "other", events)
    for arguments in ([folder, "--images", "0"], [folder, other, "--output", tmp_path / "both.html"]):
        code, lines, errors = command(*arguments, "--json")
        assert (code, errors) == (0, [])
        json.loads(lines[-1])
    assert "No evaluation yet." in " ".join(seen(folder / "report.html").text) or events[0]["event"] == "eval"


def test_files_that_are_missing_or_damaged_are_reported(tmp_path, command):
    folder = written(tmp_path / "run", FINISHED)
    (folder / "config.yaml").write_text("run: {name: <b>, epochs: 1}\n")
    (folder / "environment.json").unlink()
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('garbage\n{"event": "tr')
    code, _, errors = command(folder, "--images", "0")
    text = " ".join(seen(folder / "report.html").text)
    assert (code, errors) == (0, [])
    assert "The recipe cannot be read: " in text and "run.name" in text
    assert "no events were passed over: 6." in text and "no environment.json" in text


ODD = ["x", [], {}, True, -1, 1e308, 10**400, float("nan"), float("inf"), "\ud800", {"a": [1]}]


def test_values_of_any_type_make_a_page(tmp_path, command):
    """Each number of each kind of event, and what is known of a start, with something else in its place."""
    names = {name for event in FINISHED for name in event} - {"event"}
    events = [{**event, name: odd} for event in FINISHED for name in sorted(names & set(event)) for odd in ODD]
    starts = [start(**{name: odd}) for name in (*start(), "step", "replicas") for odd in ODD]
    folder = written(tmp_path / "run", [*FINISHED, *events], starts=starts)
    for newest in ("devices", "cpus", "started", "revision"):
        for odd in ODD:
            (folder / "environment.json").write_text(json.dumps({"starts": [*starts, start(**{newest: odd})]}))
        code, _, errors = command(folder, "--images", "0", "--json")
        assert (code, errors) == (0, [])


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.json", "config.yaml"])
def test_files_that_are_nested_without_end_make_a_page(tmp_path, command, name):
    folder = written(tmp_path / "run", FINISHED)
    (folder / name).write_text("[" * 200_000 + "\n")
    code, _, errors = command(folder, "--images", "0")
    assert (code, errors) == (0, [])


def test_a_run_that_was_resumed_a_hundred_times_stays_readable(tmp_path, command):
    starts = [start(f"2026-01-02T03:{n // 60:02d}:{n % 60:02d}+00:00", step=6 * n) for n in range(100)]
    folder = written(tmp_path / "run", [train_event(6 * n) for n in range(1, 101)], starts=starts)
    assert command(folder, "--images", "0")[0] == 0
    figures = {each["key"]: each for each in drawn(folder / "report.html")}
    assert figures["time"]["data"][0]["y"] == ["all sessions"] and figures["loss"]["marks"] == []
    text = " ".join(seen(folder / "report.html").text)
    assert "100 sessions" in text and "session 100" in text and "594 to 600" in text


def test_names_are_text(tmp_path, command):
    name = "<script>alert(1)</script> & \"q\" 'x'".replace("/", "∕")
    folders = [written(tmp_path / f"{name}{n}", FINISHED, starts=[start(command=["<i>", "&"])]) for n in range(2)]
    for arguments in ([folders[0], "--images", "0"], [*folders, "--output", folders[0] / "report.html"]):
        assert command(*arguments)[0] == 0
        page = seen(folders[0] / "report.html")
        assert page.tags.count("script") == 3 and "i" not in page.tags and page.handlers == []
        assert f"{name}0" in " ".join(page.text)
        assert drawn(folders[0] / "report.html")


def test_many_lines_make_a_page_that_can_be_sent(tmp_path, command):
    """Of 30,000 lines no spike is lost; the page says that it is thinned out. A longer run makes no larger page."""
    events = [train_event(n, trust={}, loss=1.0 if n != 20_001 else 99.0) for n in range(1, 30_001)]
    folder = written(tmp_path / "run", events)
    code, _, _ = command(folder, "--images", "0")
    page = folder / "report.html"
    assert code == 0 and page.stat().st_size < 15e6
    assert "thinned out" in " ".join(seen(page).text)
    assert 99.0 in drawn(page)[0]["data"][0]["y"]


def test_what_cannot_be_done_is_one_line(tmp_path, command, monkeypatch):
    folder = written(tmp_path / "run", FINISHED)
    (tmp_path / "file").write_text("")
    for arguments, fault in (
        ([tmp_path / "nowhere"], "nowhere: no such folder; name a run folder"),
        ([tmp_path / "file"], "file: no such folder; name a run folder"),
        ([folder, tmp_path], "neither config.yaml nor metrics.jsonl"),
        ([folder, f"{folder}/"], "run: is named twice; name each run once"),
        ([folder, "--output", tmp_path], "is a folder; name a file in it"),
        ([folder, "--output", tmp_path / "no" / "r.html"], f"there is no folder {tmp_path / 'no'}; make it, or name"),
        ([folder, "--output", tmp_path / "file" / "r.html"], "cannot be written: "),
        ([folder, "--output", "/proc/report.html"], "cannot be written: "),
    ):
        code, lines, errors = command(*arguments)
        assert (code, lines, len(errors)) == (2, [], 1) and fault in errors[0], errors
    for arguments in ([], [str(folder), "--images", "65"], [str(folder), "--images", "-1"], [str(folder), "--imags"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, _, errors = command(folder, "--images", "0")
    assert (code, errors) == (2, ["the package plotly is not installed; pip install plotly"])
    assert not (tmp_path / "no").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "environment.json", "metrics.jsonl"]


def test_a_full_disk_leaves_the_page_that_was_there(small_disk, tmp_path, command):
    output = small_disk("1m") / "report.html"
    output.write_text("before")
    code, _, errors = command(written(tmp_path / "run", FINISHED), "--images", "0", "--output", output)
    assert code == 1 and len(errors) == 1 and errors[0].startswith(f"{output}: No space left")
    assert output.read_text() == "before" and [path.name for path in output.parent.iterdir()] == ["report.html"]
