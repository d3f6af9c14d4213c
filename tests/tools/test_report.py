"""python -m tools.report: one page per run or comparison, whole in itself, made of whatever the
folder still has."""

import errno
import functools
import html.parser
import json
import os
import re
import tempfile

import pytest

from tests.tools.reporting.runs import end_event, eval_event, start, train_event, trained, written
from tools.report import main
from tools.reporting import page as pages

FINISHED = [
    train_event(6),
    eval_event(6),
    train_event(12),
    eval_event(12, 0.75),
    end_event(12, 6.0, 0.75),
]


class Seen(html.parser.HTMLParser):
    """What a browser's parser finds: text outside of scripts and styles, tags, references, and
    names of attributes."""

    def __init__(self, path):
        super().__init__()
        self.text = ""
        self.tags = []
        self.references = []
        self.attributes = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [
            value
            for name, value in attributes
            if name in ("src", "href", "srcset", "data", "action")
        ]
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        if self.cdata_elem is None:
            self.text += f" {data}"

    def check_inert(self):
        """Whether every address in it lies in itself, and no script is in it but the page's own."""
        assert self.references and all(
            re.match("#|data:", reference) for reference in self.references
        )
        assert self.tags.count("script") == 3 and not any(
            name.startswith("on") for name in self.attributes
        )


def drawn(path):
    """The figures in a page; their data holds no `<`, which could end its element."""
    data = path.read_text(encoding="utf-8").split('id="figures">')[1].split("</script>")[0]
    assert "<" not in data
    return json.loads(data)["figures"]


@pytest.fixture
def command(call, monkeypatch):
    """command(*arguments): as `call`; the page is without plotly's five megabytes."""
    monkeypatch.setattr(pages, "_plotly", str)
    return functools.partial(call, main)


@pytest.fixture(scope="module")
def run(tmp_path_factory, _one_thread):
    """Two epochs of four updates each, with an average."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    return trained(
        folder, "average.step_decay=0.5", "batch.global=359", "batch.micro=359", "log.every_steps=1"
    )


def test_a_run_becomes_a_page_in_its_folder_that_needs_nothing_else(run, command, monkeypatch):
    monkeypatch.undo()  # with plotly
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
    page = Seen(run / "report.html")
    page.check_inert()
    assert page.tags.count("img") == 6 + 1 + min(6, figures["scored"]["missed"]), (
        "one is the confusion matrix"
    )
    assert "default-src 'none'" in (run / "report.html").read_text()
    top1 = f"{100 * end['top1']:.2f} %"
    for part in ("quickstart", top1, "359 = 359 micro x 1 accumulation x 1 replica", "Images seen"):
        assert part in page.text


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
    text = Seen(tmp_path / "report.html").text
    assert "batch.global" in text and "a/run" in text and "optimizer.momentum" not in text


def test_files_that_are_missing_or_damaged_are_reported(tmp_path, command):
    folder = written(tmp_path / "run", FINISHED)
    (folder / "config.yaml").write_text("run: {name: <b>, epochs: 1}\n")
    (folder / "environment.json").unlink()
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('garbage\n{"event": "tr')
    assert command(folder, "--images", "0")[::2] == (0, [])
    text = Seen(folder / "report.html").text
    for part in (
        "The recipe cannot be read: ",
        "run.name",
        "no events were passed over: 6.",
        "no environment.json",
    ):
        assert part in text
    for name in ("metrics.jsonl", "environment.json", "config.yaml"):
        (folder / name).write_text("[" * 200_000 + "\n")
        assert command(folder, "--images", "0")[::2] == (0, [])


ODD = ["x", [], {}, True, -1, 1e308, 10**400, float("nan"), float("inf"), "\ud800", {"a": [1]}]


def test_values_of_any_type_make_a_page(tmp_path, command):
    """Each number of each kind of event, and what is known of a start, with something else in its
    place; or nothing."""
    events = [
        {**event, name: odd}
        for event in FINISHED
        for name in event
        if name != "event"
        for odd in ODD
    ]
    starts = [start(**{name: odd}) for name in (*start(), "step", "replicas") for odd in ODD]
    for newest in ("devices", "cpus", "started"):
        folder = written(
            tmp_path / "run", [*FINISHED, *events], starts=[*starts, start(**{newest: {"a": [1]}})]
        )
        assert command(folder, "--images", "0", "--json")[::2] == (0, [])
    for events in (
        [],
        [eval_event(6)],
        [{"event": "train", "step": 3, "epoch": 0.1}],
        [end_event(3, 1.0)],
    ):
        folder, other = (written(tmp_path / name, events) for name in ("run", "other"))
        assert command(folder, other, "--output", tmp_path / "both.html")[::2] == (0, [])


def test_long_runs_and_many_sessions_make_a_page_that_can_be_sent(tmp_path, command):
    """Of 15,000 lines no spike is lost; the page says that it is thinned out."""
    starts = [
        start(f"2026-01-02T03:{n // 60:02d}:{n % 60:02d}+00:00", step=150 * n) for n in range(100)
    ]
    events = [train_event(n, trust={}, loss=1.0 if n != 10_001 else 99.0) for n in range(1, 15_001)]
    folder = written(tmp_path / "run", events, starts=starts)
    assert command(folder, "--images", "0")[0] == 0
    page = folder / "report.html"
    text = Seen(page).text
    assert page.stat().st_size < 10e6 and "Long lines are thinned" in text
    assert "100 sessions" in text and "14,850 to 15,000" in text
    loss = drawn(page)[0]
    assert 99.0 in loss["data"][0]["y"] and loss["marks"] == []


ATTACKS = (
    "<script>alert(1)</script>",
    "</script></style></title><iframe srcdoc='<script>alert(2)</script>'>",
    '"><img src=x onerror=alert(3)>',
    "' onmouseover='alert(4)",
    "<a href='javascript:alert(5)'>",
    "{{ 7 * 7 }}{% raw %}&lt;b&gt;",
)


def test_markup_in_names_metrics_and_notes_is_text(tmp_path, command):
    """In folders, recipe, events, names of weights and environments; of one run and of two."""
    folders = []
    for attack in (" ".join(ATTACKS[::2]), " ".join(ATTACKS[1::2])):
        # the name of a folder has no room for all
        trust = {f"{layer}.{each}": 0.01 for layer, each in enumerate(ATTACKS)}
        events = [train_event(6 * n, trust=trust, **{attack: attack}) for n in range(1, 9)]
        events += [eval_event(48, file=attack), {"event": attack, "step": 48}, end_event(48, 30.0)]
        notes = dict.fromkeys(("started", "revision", "python", "torch", "cpus", attack), attack)
        starts = [start(**notes, command=list(ATTACKS), devices=list(ATTACKS))]
        overrides = ["data.source=folder", f"data.root={json.dumps(attack)}"]
        folders.append(written(tmp_path / attack.replace("/", "∕"), events, overrides, starts))
    both = tmp_path / "both.html"
    assert command(*folders, "--output", both)[0] == 0
    assert all(command(folder, "--images", "0")[0] == 0 for folder in folders)
    for path in (both, *(folder / "report.html" for folder in folders)):
        page = Seen(path)
        page.check_inert()
        assert "alert(" in page.text and not {"iframe", "img", "b"} & set(page.tags)
        # plotly takes some markup for its own, unless it is escaped.
        assert not any(
            "<" in str([trace.get("name"), trace["y"]])
            for each in drawn(path)
            for trace in each["data"]
        )


def test_what_cannot_be_done_is_one_line(tmp_path, command):
    folder = written(tmp_path / "run", FINISHED)
    (tmp_path / "file").write_text("")
    for arguments, fault in (
        ([tmp_path / "file"], "file: no such folder; name a run folder"),
        ([folder, tmp_path], "neither config.yaml nor metrics.jsonl"),
        ([folder, f"{folder}/"], "run: is named twice; name each run once"),
        ([folder, "--output", tmp_path], "is a folder; name a file in it"),
        (
            [folder, "--output", tmp_path / "no" / "r.html"],
            f"there is no folder {tmp_path / 'no'}; make it, or name",
        ),
        (
            [folder, "--output", tmp_path / "file" / "r.html"],
            "cannot be written: Not a directory; name another file",
        ),
        ([], "required: RUN_FOLDER"),
        *(([folder, "--images", text], "no number from 0 to 64") for text in ("65", "-1")),
    ):
        code, lines, errors = command(*arguments)
        assert (code, lines, len(errors)) == (2, [], 1) and fault in errors[0], errors
    assert not (tmp_path / "no").exists()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
    ]


def test_a_full_disk_is_no_fault_of_the_input(monkeypatch, tmp_path, command):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "something of the system's")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    code, _, (error,) = command(written(tmp_path / "run", FINISHED))
    assert code == 1 and error.startswith(f"{tmp_path}/run/report.html: No space left")
