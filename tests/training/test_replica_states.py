"""What belongs to one replica is saved with the checkpoint, counts only with it, and comes back bit for bit."""

import errno
import functools
import gc
import json
import os
import signal
import subprocess
import weakref

import pytest
import torch

import evaluate
from engines import factory
from engines.torch_engine import TorchEngine
from recipe.errors import CheckpointError
from tests import ranks
from tests.training.conftest import SIX_STEPS_AN_EPOCH
from tests.training.scripted import EMPTY, ScriptedEngine
from tests.training.test_checkpoint import DAMAGES, _Disk, content, emptied, files, pair, same
from training import checkpoint, weights
from training.checkpoint import CheckpointFolder
from training.run import run

REPLICAS = 3


def state(step, replica):
    """Something like a residual."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    return {"residual": torch.randn(2000, generator=generator), "sent": replica}


def states(step, count=REPLICAS):
    return (state(step, replica) for replica in range(count))


def names(step, count=REPLICAS):
    return [f"step-{step:08d}.replica-{replica:04d}.pt" for replica in range(count)]


def all_files(*steps):
    return sorted([*pair(*steps), *(name for step in steps for name in names(step))])


def assert_whole(checkpoints, step, warn=pytest.fail):
    """The newest whole checkpoint is of that step, and has what each replica had."""
    assert same(checkpoints.load_newest(warn, with_replicas=True), step)
    assert checkpoints.replica_count(step) == REPLICAS
    for replica in range(REPLICAS):
        loaded, expected = checkpoints.replica_state(step, replica), state(step, replica)
        assert loaded.keys() == expected.keys() and loaded["sent"] == replica
        assert torch.equal(loaded["residual"], expected["residual"])


@pytest.fixture
def folder(tmp_path):
    """folder(keep_last=2): the run's checkpoint folder, as a new process would open it."""
    return lambda keep_last=2: CheckpointFolder(tmp_path / "checkpoints", keep_last, False)


@pytest.fixture
def saved(folder):
    """saved(*steps): the folder with checkpoints of these steps."""

    def save(*steps):
        checkpoints = folder(len(steps))
        for step in steps:
            checkpoints.save(step, content(step), None, states(step))
        return checkpoints

    return save


def test_what_is_saved_is_loaded_bit_for_bit(saved, folder):
    assert files(saved(7).folder) == all_files(7)
    assert_whole(folder(), 7)


def test_the_manifest_has_size_and_checksum_of_each_file(saved):
    """The checksums are those of the sha256sum command."""
    checkpoints = saved(3)
    paths = [checkpoints.folder / name for name in names(3)]
    told = subprocess.run(["sha256sum", *paths], capture_output=True, text=True, check=True).stdout
    expected = [[path.stat().st_size, line.split()[0]] for path, line in zip(paths, told.splitlines())]
    assert json.loads(checkpoints.path(3).with_suffix(".json").read_text())["replicas"] == expected


def test_a_manifest_without_replicas_is_read_as_it_always_was(folder):
    """Those of before have no such key, and whatever has no replicas' files is written likewise."""
    folder().save(4, content(4), 0.5)
    manifest = json.loads(folder().path(4).with_suffix(".json").read_text())
    assert sorted(manifest) == ["bytes", "checksum", "sha256", "step", "top1"]
    assert same(folder().load_newest(pytest.fail, with_replicas=True), 4)
    assert folder().replica_count(4) == 0


def test_one_state_at_a_time_is_in_memory(folder):
    """A thousand replicas have a gradient's length each."""
    alive = []

    def made():
        for replica in range(REPLICAS):
            gc.collect()
            assert [reference() for reference in alive] == [None] * replica
            tensor = torch.zeros(1000)
            alive.append(weakref.ref(tensor))
            yield {"residual": tensor}
            del tensor

    folder().save(1, content(1), None, made())
    assert len(alive) == REPLICAS


def removed(path):
    path.unlink()


@pytest.mark.parametrize("damage", [removed, *DAMAGES])
@pytest.mark.parametrize("replica", [0, REPLICAS - 1])
def test_a_damaged_file_damages_the_whole_checkpoint(saved, folder, damage, replica):
    path = saved(1, 2).replica_path(2, replica)
    damage(path)
    given = []
    assert_whole(folder(), 1, given.append)
    assert len(given) == 1 and given[0].startswith(f"{path}: ") and "\n" not in given[0]


def test_files_of_two_replicas_cannot_change_places(saved, folder):
    checkpoints = saved(1, 2)
    first, second, aside = (checkpoints.folder / name for name in [*names(2, 2), "aside"])
    for old, new in ((first, aside), (second, first), (aside, second)):
        os.replace(old, new)
    given = []
    assert_whole(folder(), 1, given.append)
    assert given[0].startswith(f"{first}: damaged")


def test_if_all_are_damaged_it_says_so_and_touches_nothing(saved, folder):
    checkpoints = saved(1, 2)
    for step in (1, 2):
        checkpoints.replica_path(step, 1).unlink()
    before = files(checkpoints.folder)
    with pytest.raises(CheckpointError, match="restore one with all files of its number"):
        folder().load_newest(lambda line: None, with_replicas=True)
    assert files(checkpoints.folder) == before


def test_a_damaged_checkpoint_keeps_its_files_until_it_is_written_again(saved, folder):
    """It does not push out whole ones, and a user may yet restore what is missing."""
    checkpoints = saved(1, 9)
    checkpoints.replica_path(9, 1).unlink()
    resumed = folder()
    resumed.load_newest(lambda line: None, with_replicas=True)
    resumed.save(2, content(2), None, states(2))
    assert files(resumed.folder) == sorted({*all_files(1, 2, 9)} - {names(9)[1]})
    resumed.save(9, content(9), None, states(9))
    assert_whole(folder(), 9)
    assert files(resumed.folder) == all_files(2, 9)


def test_a_checkpoint_whose_manifest_is_damaged_keeps_its_files(saved, folder):
    """Its manifest alone knows that they are no strays."""
    checkpoints = saved(1, 2)
    emptied(checkpoints.path(2).with_suffix(".json"))
    resumed = folder()
    assert_whole(resumed, 1, lambda line: None)
    resumed.save(3, content(3), None, states(3))
    assert files(resumed.folder) == all_files(1, 2, 3)


def test_files_go_with_their_checkpoint(saved, folder):
    saved(1, 2, 3)
    folder(keep_last=2).save(4, content(4), None, states(4))
    assert files(folder().folder) == all_files(3, 4)


def test_a_checkpoint_of_fewer_replicas_leaves_none_of_the_others_behind(saved, folder):
    saved(1)
    folder().save(1, content(1), None, states(1, 2))
    assert files(folder().folder) == sorted([*pair(1), *names(1, 2)])
    assert folder().replica_count(1) == 2


def test_what_a_killed_process_left_is_removed_by_the_next_save(saved, folder):
    """It was killed while it wrote the second of three replicas; later while it removed another checkpoint."""
    checkpoints = saved(1)
    for name in (names(2)[0], f"{names(2)[1]}.tmp", names(0)[2]):
        (checkpoints.folder / name).write_bytes(b"half")
    assert_whole(folder(), 1)
    checkpoints.save(3, content(3), None)
    assert files(folder().folder) == pair(3)


def test_files_of_others_are_left_alone(saved):
    checkpoints = saved(1)
    aside = [checkpoints.folder / f"step-00000002.replica-0001{end}" for end in ("-mine.pt", ".txt")]
    for path in aside:
        path.write_bytes(b"mine")
    checkpoints.save(3, content(3), None)
    assert files(checkpoints.folder) == sorted([*pair(3), *(path.name for path in aside)])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("operation", "number"), [("write", 1), ("write", 3), ("write", 4), ("write", 5), ("fsync", 5), ("replace", 5)]
)
def test_a_failure_while_saving_leaves_the_last_one_and_no_partial_file(
    saved, folder, monkeypatch, operation, number, error
):
    """Five files are written: three replicas', the checkpoint, the manifest."""
    checkpoints = saved(1)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        disk = _Disk(patch, operation, number, error)
        checkpoints.save(2, content(2), None, states(2))
    assert disk.calls == number
    assert files(checkpoints.folder) == all_files(1)
    assert_whole(folder(), 1)
    checkpoints.save(2, content(2), None, states(2))
    assert_whole(folder(), 2)


def test_replicas_that_cannot_be_asked_leave_the_last_one(saved, folder):
    def lost():
        yield state(2, 0)
        raise RuntimeError("replica 1 is gone")

    checkpoints = saved(1)
    with pytest.raises(RuntimeError, match="replica 1 is gone"):
        checkpoints.save(2, content(2), None, lost())
    assert files(checkpoints.folder) == all_files(1)
    assert_whole(folder(), 1)


def test_a_disk_that_is_really_full_leaves_the_last_one(small_disk):
    """128 KiB hold one checkpoint of 3 replicas of 9 KiB and 65 KiB, and not two."""
    checkpoints = CheckpointFolder(small_disk("128k") / "checkpoints", 2, False)
    large = {"engine": {}, "progression": {"step": 1}, "weights": torch.zeros(16_000)}
    checkpoints.save(1, large, None, states(1))
    with pytest.raises(OSError) as caught:
        checkpoints.save(2, large, None, states(2))
    assert caught.value.errno == errno.ENOSPC
    assert files(checkpoints.folder) == all_files(1)
    assert checkpoints.load_newest(pytest.fail, with_replicas=True)["progression"]["step"] == 1


def test_the_manifest_comes_last(folder, monkeypatch):
    """So a power cut leaves a checkpoint with all its files, or none that counts."""
    renamed, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (renamed.append(new.name), replace(old, new)))
    folder().save(1, content(1), None, states(1))
    assert renamed == [*names(1), "step-00000001.pt", "step-00000001.json"]


def test_weights_can_be_had_without_them(saved):
    """A run folder that was copied without them can be scored."""
    checkpoints = saved(1, 2)
    for replica in range(REPLICAS):
        checkpoints.replica_path(2, replica).unlink()
    assert same(checkpoints.load_newest(pytest.fail), 2)


@pytest.mark.parametrize("written", [{"format": 1, "state": {}}, {"replica_format": 0, "state": {}}, [1, 2]])
def test_a_file_of_another_kind_is_refused(saved, written):
    path = saved(1).replica_path(1, 0)
    torch.save(written, path)
    with pytest.raises(CheckpointError, match="damaged, or not of a checkpoint of this program"):
        CheckpointFolder(path.parent, 2, False).replica_state(1, 0)


def test_a_replicas_file_is_no_weights(saved):
    """evaluate.py says so in one line."""
    with pytest.raises(CheckpointError, match="not weights"):
        weights.read(str(saved(1).replica_path(1, 0)))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(saved(1).replica_path(1, 0))


class _Validation:
    """One batch, again and again."""

    def __iter__(self):
        return iter([EMPTY])

    def close(self):
        pass


class _Fed(ScriptedEngine):
    """A scripted engine that is fed."""

    def training_batches(self, source, steps):
        return (EMPTY for _ in steps)

    def evaluation_batches(self, source, images):
        return _Validation()


class _Killed(Exception):
    pass


def kill_at(number):
    def before(step):
        if step == number:
            raise _Killed

    return before


@pytest.fixture
def session(tiny, tmp_path, monkeypatch):
    """session(engine, *overrides): a session of a run of 12 steps by that engine, with a checkpoint every 2."""

    def start(engine, *overrides):
        recipe = tiny(
            *SIX_STEPS_AN_EPOCH, "checkpoint.every_epochs=0.034", f"run.output={tmp_path / 'run'}", *overrides
        )
        monkeypatch.setattr(factory, "create", lambda *_: engine)
        run(recipe)

    return start


def residuals_after(steps):
    """What each replica has after so many steps, first value."""
    return [number * sum(step * 0.5 ** (steps - 1 - step) for step in range(steps)) for number in (1, 2, 3)]


def test_a_resumed_run_goes_on_with_what_each_replica_had(session, tmp_path, capsys):
    """Killed before step 8 and once more: a residual that began again at 0 would differ at the end. The halves and
    sums are exact in float32."""
    for kill in (7, 9):
        with pytest.raises(_Killed):
            session(_Fed(kill_at(kill), replicas=REPLICAS))
    assert "resuming at step 6 of 12" in capsys.readouterr().out
    last = _Fed(replicas=REPLICAS)
    session(last)
    assert last.steps == list(range(12))
    assert [residual.tolist() for residual in last.residuals] == [[value] * 5 for value in residuals_after(12)]
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints", 9, True)
    assert [manifest.step for manifest in checkpoints.manifests()] == [10, 12]
    for replica, value in enumerate(residuals_after(10)):
        assert checkpoints.replica_state(10, replica)["residual"][0] == value


def test_a_run_whose_newest_checkpoint_lacks_a_file_goes_on_from_the_one_before(session, tmp_path, capsys):
    with pytest.raises(_Killed):
        session(_Fed(kill_at(7), replicas=REPLICAS))
    missing = tmp_path / "run" / "checkpoints" / names(6)[1]
    missing.unlink()
    last = _Fed(replicas=REPLICAS)
    session(last)
    said = capsys.readouterr().out
    assert f"{missing}: cannot be read: No such file or directory; trying the one before" in said
    assert "resuming at step 4 of 12" in said
    assert [residual[0] for residual in last.residuals] == residuals_after(12)


def test_an_engine_without_such_states_refuses_them(session):
    """It would lose what the replicas have not yet sent."""
    with pytest.raises(_Killed):
        session(_Fed(kill_at(7), replicas=REPLICAS))
    with pytest.raises(CheckpointError, match="of other replicas: 3 replicas have a state of their own there, none"):
        session(_Fed())


def test_a_run_without_them_is_scored_and_not_resumed(tiny, tmp_path, monkeypatch, capsys):
    """The residuals are made up beside a real engine; evaluate.py needs only its weights."""
    place = f"run.output={tmp_path / 'run'}"
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
    monkeypatch.setattr(TorchEngine, "replica_states", lambda engine: states(1))
    run(tiny("run.steps=3", place))
    for path in (tmp_path / "run" / "checkpoints").glob("*.replica-*"):
        path.unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()  # as of a run that is not finished
    assert evaluate.main(["--checkpoint", str(tmp_path / "run")]) == 0
    assert "top1" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no older checkpoint is whole either"):
        run(tiny("run.steps=3", place))


def with_residuals(rank):
    """In this process engines have a residual each, as the scripted ones: real ranks, made-up content."""
    step, residual = TorchEngine.train_step, torch.zeros(5)

    def train_step(engine, micro_batches, number, *arguments, **keywords):
        residual.mul_(0.5).add_((rank + 1) * number)
        return step(engine, micro_batches, number, *arguments, **keywords)

    def replica_states(engine):
        for replica in range(engine.topology.replicas):
            found = engine.processes.gather_to_main(residual)
            yield {"residual": found[replica]} if found else {}

    def load_replica_states(engine, count, read):
        for replica in range(count):
            found = engine.processes.from_main(functools.partial(read, replica))
            if replica == rank:
                residual.copy_(found["residual"])

    TorchEngine.train_step = train_step
    TorchEngine.replica_states, TorchEngine.load_replica_states = replica_states, load_replica_states


def with_residuals_stopped(at, rank):
    with_residuals(rank)
    if rank == 0:
        ranks.before_step(at, functools.partial(signal.raise_signal, signal.SIGTERM))


def with_a_misfit(rank):
    """Rank 1 finds that the checkpoint does not fit."""
    with_residuals(rank)

    def refuse(engine, saved):
        raise ValueError("stem.weight is not ours")

    if rank == 1:
        TorchEngine.load_state_dict = refuse


@pytest.mark.multiprocess
def test_replicas_in_two_processes_go_on_with_what_each_had(tmp_path):
    """Rank 1 takes part in saving, or rank 0 would wait for it: each of the gatherings is of both."""
    place = f"run.output={tmp_path / 'run'}"
    stopped = ranks.train(2, place, sabotage=functools.partial(with_residuals_stopped, 4))
    assert [rank.code for rank in stopped] == [75, 75], stopped
    ended = ranks.train(2, place, sabotage=with_residuals)
    assert [rank.code for rank in ended] == [0, 0], ended
    assert "resuming at step 5 of 10" in ended[0].out
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints", 9, True)
    for replica, value in enumerate(residuals_after(10)[:2]):
        assert checkpoints.replica_state(10, replica)["residual"].tolist() == [value] * 5


@pytest.mark.multiprocess
def test_a_rank_that_finds_a_misfit_leaves_none_waiting(tmp_path):
    place = f"run.output={tmp_path / 'run'}"
    ranks.train(2, place, sabotage=functools.partial(with_residuals_stopped, 2))
    ended = ranks.train(2, place, sabotage=with_a_misfit)
    assert [rank.code for rank in ended] == [2, 2], ended
    (line,) = [line for rank in ended for line in rank.errors]
    assert "of another model: stem.weight is not ours" in line
