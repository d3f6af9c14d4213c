"""When and where runs were trained: by their folders, in words, and as they are kept."""

import json

import pytest

from benchmarks import provenance
from benchmarks.provenance import NOT_RECORDED, UNKNOWN, Provenance

ONE = Provenance(("2026-11-20",), ("AMD EPYC",), ("2.14.1",))
OTHER = Provenance(("2026-11-23", "2026-11-25"), ("Intel Xeon",), ("2.14.1",))
OLD = Provenance(("2026-11-22",), (NOT_RECORDED,), ("2.14.1",))


def start(day, **facts):
    return {"started": f"2026-11-{day}T23:59:59+00:00", "torch": "2.14.1", "step": 0, **facts}


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([start(20, processor="AMD EPYC")], ONE),
        (
            [start(25, processor="Intel Xeon"), start(23, processor="Intel Xeon", torch="2.0.1")],
            OTHER._replace(torch=("2.0.1", "2.14.1")),
        ),
        ([start(22)], OLD),
        (
            [
                start(20, processor="AMD EPYC"),
                {"started": "2026-11-27T01:00:00+00:00", "processor": "Arm"},
            ],
            ONE,
        ),
        ([{"step": 3}], UNKNOWN),
        ([], UNKNOWN),
    ],
    ids=[
        "once",
        "two sessions",
        "no processor yet",
        "a start that trained nothing",
        "nothing",
        "no start",
    ],
)
def test_a_folder_says_when_and_where_its_run_was_trained(starts, expected, tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"starts": starts}))
    assert provenance.of_folder(tmp_path) == expected
    assert provenance.of_folder(tmp_path / "none") == UNKNOWN
    kept = json.loads(json.dumps(expected._asdict()))
    assert provenance.from_json(kept) == expected


@pytest.mark.parametrize(
    ("runs", "head"),
    [
        ([ONE, ONE], "Trained 2026-11-20 on AMD EPYC, torch 2.14.1"),
        ([OTHER, ONE], "Trained 2026-11-20 to 2026-11-25 on AMD EPYC and Intel Xeon, torch 2.14.1"),
        (
            [OLD, ONE, OLD],
            "Trained 2026-11-20 to 2026-11-22 on AMD EPYC (not recorded for 2 of 3 runs), torch 2.14.1",
        ),
        ([OLD], "Trained 2026-11-22 on processors not recorded, torch 2.14.1"),
        ([UNKNOWN], "Trained on days not recorded on processors not recorded, torch not recorded"),
    ],
)
def test_the_head_of_a_page_is_about_its_runs(runs, head):
    assert provenance.described(runs) == head
