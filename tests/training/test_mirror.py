"""A run whose disk is lost goes on from its mirror, to equal bits; faults of the store never end
it."""

import json
import os
import shutil
import signal
import threading
from unittest.mock import Mock

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from common.errors import CheckpointError, ConfigError
from recipe import loading
from tests import ranks
from tests.conftest import QUICKSTART, TINY
from tests.tensors import flat
from training import preflight
from training.checkpoint import CheckpointFolder
from training.metrics import TIMING_FIELDS
from training.mirror import Mirror
from training.run_folder import RunFolder

# A run that draws in every way, for what must end in equal bits.
DRAWING = (*ranks.RECIPE, *ranks.SMALL, "batch.micro=12")
# A plainer one with as many steps, for which files are sent and when: half an epoch is five steps.
RECIPE = (
    *TINY,
    *ranks.SMALL,
    "batch.global=6",
    "batch.micro=6",
    "run.steps=10",
    "model.image_size=8",
    "checkpoint.every_epochs=0.15",
    "evaluation.every_epochs=9",
)
MEMORY = "memory://bucket/runs/mine"


@pytest.fixture(autouse=True)
def _empty_store():
    """fsspec keeps what is in memory for the whole process."""
    yield
    fsspec.filesystem("memory").store.clear()


def weights_and_events(folder):
    content = CheckpointFolder(folder / "checkpoints", 2, True).load_newest(warn=pytest.fail)
    tensors = {name: tensor.numpy().tobytes() for name, tensor in flat(content["engine"]).items()}
    events = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        events.append(
            {key: value for key, value in json.loads(line).items() if key not in TIMING_FIELDS}
        )
    return tensors, events


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "memory"])
def test_a_run_whose_folder_is_lost_goes_on_from_its_mirror(session, tmp_path, kind):
    run = tmp_path / "run"
    mirror = str(tmp_path / "far" / "away") if kind == "folder" else MEMORY
    session(*DRAWING)
    undisturbed = weights_and_events(run)
    shutil.rmtree(run)
    session(*DRAWING, f"checkpoint.mirror={mirror}", stop_at=8)
    shutil.rmtree(run)
    said = session(*DRAWING, f"checkpoint.mirror={mirror}")
    assert f"restored from {mirror}" in said and "resuming at step 8 of 10" in said
    assert weights_and_events(run) == undisturbed
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 8]
    # What is there in the end is the run folder, but for the lock of this machine.
    here = files(run)
    del here["lock"]
    if kind == "folder":
        there = files(tmp_path / "far" / "away")
    else:
        store = fsspec.filesystem("memory")
        root = "/bucket/runs/mine/"
        there = {path[len(root) :]: store.cat_file(path) for path in store.find(root)}
    assert there == here


def test_weights_to_start_from_that_are_lost_with_the_folder_are_not_missed_once_the_mirror_has_a_checkpoint(
    session, tmp_path
):
    """They are refused later, in a line, where it has none."""
    weights = tmp_path / "pretrain"
    session(*RECIPE, f"run.output={weights}", stop_at=2)
    overrides = (*RECIPE, f"model.init_from={weights}", f"checkpoint.mirror={tmp_path / 'mirror'}")
    recipe = loading.load(QUICKSTART, [f"run.output={tmp_path / 'run'}", *overrides])
    assert f"starting from {weights}" in session(*overrides, stop_at=5)
    shutil.rmtree(weights)
    shutil.rmtree(tmp_path / "run")
    preflight.check(recipe)
    assert "resuming at step 5 of 10" in session(*overrides, stop_at=6)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    # What was trained here is not filled.
    with pytest.raises(CheckpointError, match=r"init_from: .*pretrain: no such file or folder"):
        preflight.check(recipe)
    for lost in ("run", "mirror"):
        shutil.rmtree(tmp_path / lost)
    preflight.check(recipe)
    with pytest.raises(
        CheckpointError, match="pretrain: no such file or folder; name a run folder"
    ) as refusal:
        session(*overrides)
    assert "\n" not in str(refusal.value)


def test_a_mirror_of_another_run_or_of_other_files_is_refused_and_left_alone(session, tmp_path):
    place = tmp_path / "mirror"
    overrides = (*RECIPE, f"checkpoint.mirror={place}")
    session(*overrides)
    before = files(place)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=f"^{place} belongs to another recipe: optimizer.momentum is "
    ):
        session(*overrides, "optimizer.momentum=0.5")
    with pytest.raises(ConfigError, match=r"holds a run and run\.resume is never"):
        session(*overrides, "run.resume=never")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.jpg").write_bytes(b"x")
    with pytest.raises(
        ConfigError,
        match=r"photos holds files that are no run \(mine.jpg\); name a place of its own",
    ):
        session(*RECIPE, f"checkpoint.mirror={tmp_path / 'photos'}")
    assert files(place) == before and len(files(tmp_path / "photos")) == 1


def test_a_mirror_that_is_ahead_of_the_folder_loses_nothing(session, tmp_path):
    """Another machine went on from it: its newer checkpoints would be removed."""
    place = tmp_path / "mirror"
    overrides = (*RECIPE, f"checkpoint.mirror={place}")
    session(*overrides, stop_at=5)
    shutil.copytree(tmp_path / "run", tmp_path / "stale")
    session(*overrides)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "stale", tmp_path / "run")
    before = files(place)
    with pytest.raises(
        ConfigError,
        match=r"is ahead of .*run \(checkpoints/step-00000010.json\); remove the folder",
    ):
        session(*overrides)
    assert files(place) == before


def test_faults_of_the_store_are_said_and_tried_again(session, tmp_path, monkeypatch):
    """The third file cannot be sent, at once and once more; the next checkpoint sends it."""
    sent = []
    send_file = Mirror._send_file

    def failing(mirror, name):
        sent.append(name)
        if len(sent) in (3, 4):
            raise PermissionError("quota exceeded")
        send_file(mirror, name)

    monkeypatch.setattr(Mirror, "_send_file", failing)
    said = session(*RECIPE, f"checkpoint.mirror={tmp_path / 'mirror'}")
    line = f"checkpoint.mirror: {tmp_path / 'mirror'}: quota exceeded; it is tried again with the next checkpoint"
    assert said.count(line) == 1
    here = files(tmp_path / "run")
    del here["lock"]
    assert files(tmp_path / "mirror") == here


@pytest.mark.parametrize("is_folder_lost", [False, True])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_first_transfer_that_is_cut_off_is_gone_on_with(
    mirrored, tmp_path, monkeypatch, number, is_folder_lost
):
    """Before each of its five files; without its folder the run begins anew, as nothing is lost by
    that."""
    sent = []
    send_file = Mirror._send_file

    def failing(mirror, name):
        if len(set(sent) | {name}) >= number:
            raise ConnectionError("cut off")
        sent.append(name)
        send_file(mirror, name)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_send_file", failing)
        mirrored(100).close()
    assert len(sent) == number - 1 and (not sent or sent[0] == "config.yaml")
    if is_folder_lost:
        shutil.rmtree(tmp_path / "run")
    step = 200 - 100 * is_folder_lost
    mirrored(step).close()
    here = files(tmp_path / "run")
    del here["lock"]
    assert files(tmp_path / "mirror") == here and f"checkpoints/step-{step:08d}.json" in here


@pytest.mark.parametrize("others", [(), ("checkpoints/step-00000100.pt",)])
def test_files_of_a_run_without_its_recipe_are_a_first_transfer_that_was_cut_off(
    mirrored, tmp_path, others
):
    """Older versions sent the recipe in any order.

    Files of others beside them are refused as ever.
    """
    folder = mirrored(100)
    place = tmp_path / "mirror"
    (place / "checkpoints").mkdir(parents=True)
    for name in ("environment.json", "metrics.jsonl", *others):
        shutil.copy(folder.path / name, place / name)
    (place / "checkpoints" / "best.pt").touch()
    folder.mirror = None
    folder.close()
    with pytest.raises(ConfigError, match=r"holds files that are no run \(checkpoints/best.pt\)"):
        mirrored()
    (place / "checkpoints" / "best.pt").unlink()
    mirrored().close()
    assert {"config.yaml", "checkpoints/step-00000100.json"} <= files(place).keys()


def test_several_checkpoints_without_manifests_are_no_first_transfer_of_a_new_run(
    mirrored, tmp_path
):
    """An older run was mirrored for the first time, or its manifests were removed."""
    mirrored(100, 200).close()
    for manifest in (tmp_path / "mirror" / "checkpoints").glob("*.json"):
        manifest.unlink()
    before = files(tmp_path / "mirror")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match="mirror has 2 checkpoints, all without their manifests; restore these, or",
    ):
        mirrored()
    assert files(tmp_path / "mirror") == before


def test_a_transfer_that_is_cut_off_is_begun_once_more_at_once(
    mirrored, tmp_path, monkeypatch, capsys
):
    """A regroup of an elastic run cuts connections, and its last checkpoint may be long in
    coming."""
    put_file = LocalFileSystem.put_file
    cut = [ConnectionError("cut off")]

    def failing(system, *arguments, **options):
        if cut:
            raise cut.pop()
        return put_file(system, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", failing)
    mirrored(100).close()
    assert not cut and "cut off" not in capsys.readouterr().out
    assert (tmp_path / "mirror" / "checkpoints" / "step-00000100.json").exists()


def test_manifests_come_last_and_go_first_once_the_next_is_there(tmp_path, monkeypatch):
    """At each moment what is in the mirror is a run whose listed checkpoints are whole."""
    folder = tmp_path / "run"
    folder.mkdir()
    mirror = Mirror(str(tmp_path / "mirror"), folder, pytest.fail, check=Mock())
    checkpoints = CheckpointFolder(folder / "checkpoints", 1, False, mirror)
    order = []
    monkeypatch.setattr(mirror, "_send_file", order.append)
    monkeypatch.setattr(
        mirror._system, "rm_file", lambda path: order.append(f"-{path.rpartition('/')[2]}")
    )
    there = set()
    monkeypatch.setattr(mirror, "_remote_names", lambda: there)
    for step in (1, 2):
        checkpoints.save(
            step, {"engine": {"w": torch.zeros(9)}}, None, [{"residual": torch.zeros(9)}]
        )
        mirror.wait()
        there = {
            f"checkpoints/step-0000000{step}.{kind}" for kind in ("pt", "json", "replica-0000.pt")
        }
    first = order[:3]
    second = order[3:]
    assert first[-1] == "checkpoints/step-00000001.json" and len(first) == 3
    assert second[2] == "checkpoints/step-00000002.json" and second[3] == "-step-00000001.json"
    assert len(second) == 6


def test_training_goes_on_while_files_are_sent(session, tmp_path, monkeypatch):
    threads = set()
    send = Mirror._send

    def noted(mirror):
        threads.add(threading.current_thread() is threading.main_thread())
        send(mirror)

    monkeypatch.setattr(Mirror, "_send", noted)
    session(*RECIPE, f"checkpoint.mirror={MEMORY}")
    assert threads == {False}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nowhere://bucket/run", r"checkpoint.mirror: nowhere://bucket/run: Protocol not known"),
        (
            "s3://me:secret@bucket/run",
            "has credentials in it; give them as the store's package reads them",
        ),
    ],
)
def test_urls_that_cannot_be_used_are_refused(session, url, said):
    with pytest.raises(ConfigError, match=said) as refusal:
        session(*RECIPE, f"checkpoint.mirror={url}")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("run", "is the run folder itself"),
        ("file://{}/run/mirror", "lies in the run folder .*run, and would be copied into itself"),
        ("link/mirror", "lies in the run folder .*run, and would be copied into itself"),
        (
            "simplecache::file://{}/run/mirror",
            "lies in the run folder .*run, and would be copied into itself",
        ),
        ("", "has the run folder .*run in it, and would be copied into that"),
    ],
)
def test_a_mirror_in_the_run_folder_or_around_it_is_refused(tiny, tmp_path, place, said):
    """Each checkpoint would copy the copies; links count as what they lead to."""
    (tmp_path / "link").symlink_to("run")
    url = place.format(tmp_path) if "{}" in place else str(tmp_path / place)
    recipe = tiny(f"run.output={tmp_path / 'run'}", f"checkpoint.mirror={url}")
    for refused in (preflight.check, RunFolder):
        with pytest.raises(
            ConfigError, match=f"^checkpoint.mirror: .* {said}; name a place of its own$"
        ):
            refused(recipe)
    # Beside it, with a name that begins alike.
    RunFolder(
        tiny(f"run.output={tmp_path / 'run'}", f"checkpoint.mirror={tmp_path / 'run-mirror'}")
    ).close()


def test_a_name_that_leads_out_of_the_run_folder_is_refused(tmp_path):
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/run/config.yaml", b"")
    store.store["/bucket/run/../../outside"] = store.store["/bucket/run/config.yaml"]
    mirror = Mirror("memory://bucket/run", tmp_path, pytest.fail, check=Mock())
    with pytest.raises(ConfigError, match=r"a file is named '\.\./\.\./outside'"):
        mirror.restore()


def test_the_key_may_change_between_sessions(session, tmp_path):
    session(*RECIPE, stop_at=5)
    session(*RECIPE, f"checkpoint.mirror={tmp_path / 'mirror'}", stop_at=8)
    session(*RECIPE)
    manifests = sorted(path.name for path in (tmp_path / "mirror" / "checkpoints").glob("*.json"))
    assert manifests[-1] == "step-00000008.json"
    assert loading.load(tmp_path / "run" / "config.yaml").checkpoint.mirror is None
    assert loading.load(QUICKSTART).checkpoint.mirror is None


@pytest.fixture
def mirrored(tiny, tmp_path):
    """mirrored(*steps, **options): the open folder of a mirrored run with checkpoints of
    `steps`."""
    folders = []

    def open_folder(*steps, **options):
        recipe = tiny(f"run.output={tmp_path / 'run'}", f"checkpoint.mirror={tmp_path / 'mirror'}")
        folders.append(RunFolder(recipe, **options))
        fill(folders[-1].path, *steps)
        return folders[-1]

    yield open_folder
    for folder in folders:
        folder.close()


def fill(folder, *steps):
    """Write checkpoints as a run would, but without what is in them."""
    checkpoints = CheckpointFolder(folder / "checkpoints", 9, True)
    for step in steps:
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        checkpoints.save(step, {"engine": {"w": torch.full([99], float(step))}}, None)


def fill_branch(run, *steps):
    """Write checkpoints as a branch of a run would; returns the name of the last one's manifest."""
    (run / "branches" / "lr").mkdir(parents=True)
    fill(run / "branches" / "lr", *steps)
    return f"branches/lr/checkpoints/step-{steps[-1]:08d}.json"


def test_a_later_checkpoint_of_a_branch_here_costs_the_mirror_none_of_its_own(mirrored, tmp_path):
    """A stale folder whose branch is ahead is behind its mirror all the same."""
    folder = mirrored(100, 200)
    fill_branch(folder.path, 600)
    folder.close()
    shutil.copytree(folder.path, tmp_path / "stale")
    mirrored(300).close()
    before = files(tmp_path / "mirror")
    shutil.rmtree(folder.path)
    (tmp_path / "stale").rename(folder.path)
    with pytest.raises(ConfigError, match=r"is ahead of .*run \(checkpoints/step-00000300.json\)"):
        mirrored()
    assert files(tmp_path / "mirror") == before


def test_a_later_checkpoint_of_a_branch_there_is_no_reason_to_refuse_and_is_kept(
    mirrored, tmp_path
):
    folder = mirrored(100)
    branch = fill_branch(folder.path, 600)
    folder.close()
    shutil.rmtree(folder.path / "branches")
    mirrored(200).close()
    mirrored(700).close()
    there = files(tmp_path / "mirror")
    assert "checkpoints/step-00000700.json" in there and branch in there


def test_checkpoints_of_branches_are_sent_like_the_runs_own(mirrored, monkeypatch):
    """A manifest comes after the weights that it tells of, and what is there whole is not sent
    again."""
    folder = mirrored(100)
    fill_branch(folder.path, 50, 100)
    sent = []
    send_file = Mirror._send_file
    monkeypatch.setattr(
        Mirror, "_send_file", lambda mirror, name: (sent.append(name), send_file(mirror, name))
    )
    folder.close()
    kinds = [name.rpartition(".")[2] for name in sent if "step-" in name]
    assert kinds == ["pt"] * 3 + ["json"] * 3
    del sent[:]
    mirrored().close()
    assert not [name for name in sent if "step-" in name]


def test_folders_that_are_links_are_sent_and_links_in_a_circle_are_not_followed(mirrored, tmp_path):
    """The checkpoints may lie on a larger disk."""
    disk = tmp_path / "disk" / "of" / "checkpoints"
    disk.mkdir(parents=True)
    (tmp_path / "other_run").mkdir()
    (tmp_path / "other_run" / "config.yaml").touch()
    folder = mirrored()
    (folder.path / "checkpoints").symlink_to(disk)
    fill(folder.path, 100)
    (folder.path / "trace").mkdir()
    (folder.path / "trace" / "run").symlink_to(folder.path)
    (folder.path / "runs").symlink_to(tmp_path)
    (disk / "up").symlink_to(disk.parent)
    (tmp_path / "mirror").mkdir()
    (folder.path / "copy").symlink_to(tmp_path / "mirror")
    folder.close()
    there = files(tmp_path / "mirror").keys()
    names = {"config.yaml", "environment.json", "metrics.jsonl"}
    assert there == names | {f"checkpoints/step-00000100.{kind}" for kind in ("json", "pt")}
    shutil.rmtree(folder.path)
    assert files(mirrored().path).keys() == there | {"lock"}


def test_checkpoints_behind_a_link_in_the_mirror_are_gone_on_with(mirrored, tmp_path):
    """To a larger disk there; a run that missed them would begin anew."""
    folder = mirrored(100, 200)
    folder.close()
    there = tmp_path / "mirror" / "checkpoints"
    there.rename(tmp_path / "disk")
    there.symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "up").symlink_to(tmp_path / "mirror")
    shutil.rmtree(folder.path)
    again = mirrored()
    assert sorted(path.name for path in (again.path / "checkpoints").glob("*.pt")) == [
        "step-00000100.pt",
        "step-00000200.pt",
    ]
    fill(again.path, 300)
    (again.path / "checkpoints" / "step-00000100.pt").unlink()
    again.close()
    assert there.is_symlink()
    assert sorted(path.name for path in there.glob("*.pt")) == [
        "step-00000200.pt",
        "step-00000300.pt",
    ]


def test_what_lies_in_the_place_of_a_replaced_folder_is_not_sent_and_removes_nothing(
    mirrored, tmp_path, capsys
):
    """Neither is it once that is opened as the run's own: the mirror has later checkpoints."""
    place = tmp_path / "mirror"
    mirrored(100, 200).close()
    before = files(place)
    folder = mirrored()
    folder.path.rename(tmp_path / "old")
    folder.path.mkdir()
    shutil.copy(tmp_path / "old" / "config.yaml", folder.path)
    fill(folder.path, 7)
    with pytest.raises(OSError, match="removed, renamed, replaced or unmounted"):
        folder.note(step=1)
    folder.close()
    assert files(place) == before
    assert "removed, renamed, replaced or unmounted" in capsys.readouterr().out
    mirrored(has_trained=True).close()
    assert set(before) < set(files(place)) and "checkpoints/step-00000007.json" in files(place)


def test_a_lost_folder_is_filled_also_for_a_process_that_has_trained(mirrored, tmp_path):
    """The first checkpoint in an empty one would write over the mirror's events, and remove its
    checkpoints."""
    mirrored(100, 200).close()
    before = files(tmp_path / "mirror")
    shutil.rmtree(tmp_path / "run")
    folder = mirrored(has_trained=True)
    assert files(folder.path).keys() == before.keys() | {"lock"}
    fill(folder.path, 300)
    folder.close()
    assert before.keys() < files(tmp_path / "mirror").keys()


def test_a_lost_folder_that_cannot_be_filled_to_the_end_is_written_by_a_process_that_has_trained(
    mirrored, tmp_path, monkeypatch, capsys
):
    """Without the mirror, which keeps what it has."""
    mirrored(100).close()
    before = files(tmp_path / "mirror")
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(LocalFileSystem, "get_file", Mock(side_effect=OSError("cut off")))
    mirrored(200, has_trained=True).close()
    assert "run is not mirrored from here: " in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "step-00000200.json").exists()
    assert files(tmp_path / "mirror") == before


@pytest.mark.parametrize("number", range(1, 8))
def test_a_restore_that_is_cut_off_is_said_and_repeated_by_the_same_command(
    mirrored, tmp_path, monkeypatch, number
):
    """Before each of its seven files."""
    mirrored(100, 200).close()
    before = files(tmp_path / "mirror")
    shutil.rmtree(tmp_path / "run")
    fetched = []
    get_file = LocalFileSystem.get_file

    def failing(system, *arguments, **options):
        fetched.append(arguments)
        if len(fetched) == number:
            raise ConnectionError("the store does not answer")
        return get_file(system, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "get_file", failing)
        with pytest.raises(
            ConfigError, match="mirror: the store does not answer; mend that, or train without"
        ):
            mirrored()
    mirrored().close()
    here = files(tmp_path / "run")
    del here["lock"]
    # Each start notes itself.
    for found in (before, here):
        del found["environment.json"]
    assert here == before


def test_a_part_of_a_run_is_not_trained_without_its_mirror(mirrored, tiny, tmp_path, monkeypatch):
    mirrored(100).close()
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(LocalFileSystem, "get_file", Mock(side_effect=OSError("cut off")))
    with pytest.raises(ConfigError, match="cut off"):
        mirrored()
    before = files(tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"run holds a part of a run, .*; give the same checkpoint\.mirror to go on",
    ):
        RunFolder(tiny(f"run.output={tmp_path / 'run'}"))
    assert files(tmp_path / "run") == before


def test_a_checkpoint_that_is_there_whole_is_not_sent_again(mirrored, tmp_path, monkeypatch):
    """Nor is one that was cut short there taken for whole."""
    mirrored(100, 200).close()
    place = tmp_path / "mirror" / "checkpoints"
    whole = (place / "step-00000100.pt").read_bytes()
    (place / "step-00000100.pt").write_bytes(whole[:9])
    sent = []
    send_file = Mirror._send_file
    monkeypatch.setattr(
        Mirror, "_send_file", lambda mirror, name: (sent.append(name), send_file(mirror, name))
    )
    mirrored().close()
    assert {name for name in sent if "step-" in name} == {
        "checkpoints/step-00000100.pt",
        "checkpoints/step-00000100.json",
    }
    assert (place / "step-00000100.pt").read_bytes() == whole


@pytest.mark.parametrize("method", ["put_file", "pipe_file"])
def test_a_transfer_that_is_cut_off_leaves_the_file_before_it(
    mirrored, tmp_path, monkeypatch, method
):
    """In a folder, where a file that is written is there from its first byte on."""
    mirrored(100).close()
    place = tmp_path / "mirror"
    before = files(place)
    folder = mirrored()
    # Another one of the same step, as after one that was damaged.
    checkpoints = CheckpointFolder(folder.path / "checkpoints", 9, True)
    checkpoints.save(100, {"engine": {"w": torch.ones(9)}}, 0.5)

    def half(system, first, second, **options):
        target = first if method == "pipe_file" else second
        with open(target, "wb") as stream:
            stream.write(b"half")
        raise ConnectionError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, method, half)
        folder.close()
    unfinished = [name for name in files(place) if name.endswith(".tmp")]
    assert len(unfinished) == 1
    for name in before.keys() - {"environment.json"}:
        assert files(place)[name] == before[name]
    # The next transfer writes over it, and a folder that is filled does not have it.
    mirrored().close()
    shutil.rmtree(tmp_path / "run")
    mirrored().close()
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_second_sigterm_while_the_mirror_is_written_after_the_loop_is_no_reason_to_lose_it(
    session, tmp_path, monkeypatch
):
    close = Mirror.close

    def slow(mirror):
        signal.raise_signal(signal.SIGTERM)
        close(mirror)

    monkeypatch.setattr(Mirror, "close", slow)
    killed = Mock()
    old = signal.signal(signal.SIGTERM, killed)
    try:
        session(*RECIPE, f"checkpoint.mirror={tmp_path / 'mirror'}", stop_at=5)
        assert not killed.called
        assert (tmp_path / "mirror" / "checkpoints" / "step-00000005.json").exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert killed.called
    finally:
        signal.signal(signal.SIGTERM, old)
