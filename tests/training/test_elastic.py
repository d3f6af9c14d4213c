"""Replicas that are lost, and come back, within a run: it ends with the bits of one that nothing
disturbed."""

import copy
import errno
import json
import os
import queue
import signal
from unittest.mock import Mock

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import train
from benchmarks.faults.site import RECIPE, Site, Topology
from common.errors import ConfigError, MachineError
from engines.torch_engine import TorchEngine
from parallel import topology
from parallel.elastic import Elastic
from parallel.generations import Regroup
from parallel.processes import Processes
from tests import ranks
from tests.conftest import QUICKSTART
from tests.engines import threads
from tests.training.scripted import ScriptedEngine
from tests.waiting import wait_until
from training import elastic as elastic_module
from training import run as run_module
from training.elastic import Known, Memory, common, identity, run
from training.loop import Stopped
from training.metrics import length_until
from training.mirror import Mirror
from training.progression import Progression
from training.run_folder import RunFolder, starts

DONE = 0
STOPPED = 75
ELASTIC = ("parallel.elastic=true", "parallel.silence=2", "run.epochs=6")


@pytest.mark.parametrize(
    ("known", "step"),
    [
        ([(True, [6, 7]), (False, [6, 7])], 7),
        ([(True, [6, 7]), (False, [5, 6])], 6),  # one was hit before it had done the last step
        ([(False, [6, 7]), (False, [6, 7])], 6),  # the main one may not have written step 7
        ([(False, [5, 6]), (False, [6, 7])], 6),
        # a new one knows none; and nothing came before 7 in this generation
        (
            [(False, [7]), (False, [])],
            7,
        ),
        ([(False, []), (False, [])], None),
    ],
)
def test_all_go_on_from_the_last_step_that_all_and_the_main_one_have_done(known, step):
    assert common([Known(*process) for process in known]) == step


class Counter:
    """An engine whose steps add one to a tensor, which the engine replaces, or changes in place."""

    def __init__(self, processes):
        self.processes = processes
        self.topology = processes.topology
        self.device = torch.device("cpu")
        self.places = {"changed": torch.zeros(3), "replaced": torch.zeros(())}

    def step(self):
        self.places["changed"] += 1
        self.places["replaced"] = self.places["replaced"] + 1

    def live_state(self):
        return self.places

    def load_live_state(self, state):
        for name, tensor in self.places.items():
            tensor.copy_(state[name])


def test_all_go_back_to_a_step_that_a_process_remembers_and_one_that_is_new_gets_it():
    """The last two steps are remembered, in memory that is used again."""
    mail = queue.SimpleQueue()

    def generation(processes):
        new = processes.topology.rank == 2

        def pass_on(value, source, receivers):
            assert (source, receivers) == (0, [2])
            if new:
                return mail.get()
            mail.put(copy.deepcopy(value))
            return value

        processes.pass_on = pass_on
        engine = Counter(processes)
        memory = Memory([])
        memories = set()
        if new:
            assert memory.restore(engine).step == 4
        else:
            for step in range(1, 6 - processes.topology.rank):
                engine.step()
                memory.keep(engine, Progression(step=step))
                memories |= {state.engine["changed"].data_ptr() for state in memory.states.values()}
            assert len(memories) == 2 == len(memory.states)
            assert memory.restore(engine).step == 4
        assert memory.states.keys() == {4}
        memory.keep(engine, Progression(step=4))
        engine.step()
        memory.keep(engine, Progression(step=5))
        found = {step: state.engine for step, state in memory.states.items()}
        return {
            step: (each["changed"].tolist(), each["replaced"].item())
            for step, each in found.items()
        }

    expected = {4: ([4.0] * 3, 4.0), 5: ([5.0] * 3, 5.0)}
    assert threads.run(3, 1, generation) == [expected] * 3


def test_an_update_counts_only_if_the_generation_was_not_over_once_the_device_had_made_it(
    monkeypatch,
):
    """What is broken off on a GPU raises no error there."""
    waited = []
    monkeypatch.setattr("training.elastic.synchronize", waited.append)
    processes = Mock(spec=Processes, topology=None)
    processes.check.side_effect = Regroup
    with pytest.raises(Regroup):
        Memory([]).check(Counter(processes))
    assert waited == [torch.device("cpu")]


def test_events_count_until_the_step_and_without_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"event": kind, "step": step}) + "\n" for kind, step in (
        ("train", 1), ("eval", 1), ("checkpoint", 1), ("train", 2), ("end", 2),
    )]  # fmt: skip
    path.write_text("".join(lines) + '{"event": "tra')
    assert [length_until(path, step) for step in (0, 1, 2)] == [
        0,
        len("".join(lines[:3])),
        len("".join(lines[:4])),
    ]
    assert length_until(tmp_path / "none", 1) == 0


def test_other_recipes_and_images_are_other_runs(tiny_recipe):
    one = identity(tiny_recipe, [])
    other = identity(
        tiny_recipe.model_copy(update={"batch": tiny_recipe.batch.model_copy(update={"micro": 4})}),
        [],
    )
    assert (
        one["recipe"] != other["recipe"]
        and one["code"] == other["code"]
        and one["images"] == other["images"]
    )


@pytest.fixture
def tiny_recipe():
    from recipe import loading
    from tests.conftest import QUICKSTART

    return loading.load(QUICKSTART, [])


@pytest.mark.parametrize(("name", "value"), [("POD_LAUNCHER", "0"), ("platform", "darwin")])
def test_other_launchers_and_systems_are_refused(tiny_recipe, monkeypatch, name, value):
    monkeypatch.setenv("POD_LAUNCHER", "1" if name == "platform" else value)
    monkeypatch.setattr("sys.platform", value if name == "platform" else "linux")
    with pytest.raises(
        ConfigError, match=r"needs Linux, and \./run_pod\.sh, .*use parallel\.elastic=false"
    ):
        run(tiny_recipe, Topology(2, 1), None)


def elastic_engine(**options):
    """Makes steps by a script, as the main process of an elastic run."""
    engine = ScriptedEngine(**options)
    engine.processes = Processes(topology.Topology(), engine.device)
    engine.processes.elastic = Mock(spec=Elastic)
    engine.processes.elastic.wants.return_value = False
    return engine


@pytest.mark.parametrize(("step", "saved"), [(5, [5]), (6, [6]), (0, [])])
def test_a_run_that_is_told_to_stop_between_two_generations_saves_before_the_next_step(
    start, step, saved
):
    """At step 6 there is a checkpoint, with the scores of its evaluation: it stays.

    At step 0 there is nothing.
    """
    if step == 6:
        start(ScriptedEngine(), "run.steps=6")
    before = start.content() if step == 6 else None
    engine = elastic_engine()
    memory = Mock(spec=Memory, signal=signal.SIGTERM)
    with pytest.raises(
        Stopped,
        match=f"^SIGTERM: saved at step {step};" if step else "^SIGTERM: the same command begins",
    ):
        start(engine, progression=Progression(step=step), memory=memory)
    assert not engine.steps and start.saved() == saved
    assert before is None or str(start.content()) == str(before)
    assert engine.processes.elastic.note_saved.called


def test_a_generation_that_has_nothing_left_to_do_ends_the_run_though_it_is_told_to_stop(start):
    engine = elastic_engine()
    memory = Mock(spec=Memory, signal=signal.SIGTERM)
    scores = {"top1": 0.5, "top5": 0.5}
    *_, end = start(engine, progression=Progression(step=12, scores=scores), memory=memory)
    assert end["event"] == "end" and not engine.steps


def test_launchers_learn_that_the_run_is_saved_once_it_is(start):
    engine = elastic_engine(before=lambda step: step == 2 and signal.raise_signal(signal.SIGTERM))
    engine.processes.elastic.note_saved.side_effect = lambda: saved.extend(start.saved())
    saved = []
    with pytest.raises(Stopped):
        start(engine, memory=Mock(spec=Memory, signal=None))
    assert saved == [3]


def test_a_run_that_ends_with_an_error_listens_no_more(tiny_recipe, monkeypatch):
    """A thread that asks the store while Python shuts down would end the process by SIGABRT."""
    elastic = Mock(spec=Elastic, number=0)
    elastic.explains.return_value = False
    monkeypatch.setenv("POD_LAUNCHER", "1")
    monkeypatch.setattr("training.elastic.Elastic", lambda *_: elastic)
    monkeypatch.setattr("training.elastic.factory.connect", lambda *_: None)
    with pytest.raises(Stopped):
        run(tiny_recipe, topology.Topology(2, 1, rank=1), Mock(side_effect=Stopped("saved")))
    assert [call[0] for call in elastic.mock_calls] == ["begin", "explains", "close"]


@pytest.fixture
def mirrored(tiny, tmp_path):
    """The recipe of a run with a mirror."""
    return tiny(f"run.output={tmp_path / 'run'}", f"checkpoint.mirror={tmp_path / 'mirror'}")


@pytest.fixture
def store_is_down(monkeypatch):
    """store_is_down(): from then on the mirror's store does not answer."""
    down = Mock(side_effect=ConnectionError("the store does not answer"))

    def begin():
        for method in ("exists", "find", "cat_file", "put_file", "pipe_file"):
            monkeypatch.setattr(LocalFileSystem, method, down)

    return begin


def generation_of(recipe, memory):
    """The run folder as it is open in a generation of a single process, which ends at once."""
    processes = Processes(topology.Topology(), torch.device("cpu"))
    with run_module._run_folder(recipe, processes, memory) as folder:
        return folder


def test_a_regroup_waits_for_no_upload_and_for_no_store(mirrored, monkeypatch, store_is_down):
    """The main process keeps its folder and its mirror, and closes them in the end."""
    closed = Mock()
    monkeypatch.setattr(Mirror, "close", closed)
    memory = Memory([])
    memory.begin(0)
    folder = generation_of(mirrored, memory)
    store_is_down()
    memory.begin(1)
    assert generation_of(mirrored, memory) is folder
    assert len(starts(folder.path)) == 2 and not closed.called
    memory.close()
    memory.close()
    assert closed.call_count == 1


@pytest.mark.parametrize("fault", ["down", "unknown"])
def test_a_store_that_is_down_ends_no_run_whose_main_process_was_lost(
    mirrored, monkeypatch, capsys, store_is_down, fault
):
    """Another process opens folder and mirror for the first time."""
    lost = RunFolder(mirrored)
    (lost.path / "checkpoints").mkdir()
    (lost.path / "checkpoints" / "step-00000001.json").write_text("manifest")
    lost.close()
    if fault == "down":
        store_is_down()
    else:
        monkeypatch.setattr(
            "fsspec.url_to_fs", Mock(side_effect=PermissionError("the store does not answer"))
        )
    memory = Memory([])
    memory.states = {1: None}
    memory.begin(1)
    generation_of(mirrored, memory)
    memory.close()
    assert "the store does not answer" in capsys.readouterr().out


def test_the_folder_is_waited_for_in_later_generations_and_then_the_machine_has_failed(
    mirrored, monkeypatch
):
    """Of wrong input (ConfigError) the launcher would make the end of the whole run."""
    assert elastic_module._HANDED_OVER_SECONDS > 90, "a lease of NFS"
    monkeypatch.setattr(elastic_module, "_HANDED_OVER_SECONDS", 0.2)
    lockf = Mock(side_effect=BlockingIOError(errno.EAGAIN, "locked"))
    monkeypatch.setattr("training.run_folder.fcntl.lockf", lockf)
    monkeypatch.setattr("training.run_folder._LOCK_TRIALS", 1)  # each call opens the folder once
    memory = Memory([])
    alone = Processes(topology.Topology(), torch.device("cpu"))
    memory.begin(0)
    with pytest.raises(ConfigError, match="is in use by another process"):
        memory.open_folder(mirrored, alone)
    assert lockf.call_count == 1
    memory.begin(1)
    with pytest.raises(
        MachineError, match=r"still in use by another process after 0\.2 s; end that one, then"
    ):
        memory.open_folder(mirrored, alone)
    assert lockf.call_count > 2
    lockf.reset_mock()
    lockf.side_effect = [BlockingIOError(errno.EAGAIN, "locked"), OSError(errno.ENOLCK, "no locks")]
    with pytest.raises(ConfigError, match="no locks"):
        memory.open_folder(mirrored, alone)
    assert lockf.call_count == 2


def test_the_folder_is_not_waited_for_once_its_generation_is_over(mirrored, monkeypatch):
    lockf = Mock(side_effect=BlockingIOError(errno.EAGAIN, "locked"))
    monkeypatch.setattr("training.run_folder.fcntl.lockf", lockf)
    monkeypatch.setattr("training.run_folder._LOCK_TRIALS", 1)  # each call opens the folder once
    memory = Memory([])
    processes = Mock(spec=Processes)
    processes.check.side_effect = [None, Regroup]
    memory.begin(1)
    with pytest.raises(Regroup):
        memory.open_folder(mirrored, processes)
    assert lockf.call_count == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Of one process, and not elastic."""
    site = Site(tmp_path_factory.mktemp("alone"), Topology(1, 1), ELASTIC[2:])
    ending = site.start().wait(0.0)
    assert ending.code == DONE, ending.said
    return site.result()


def run_and_strike(folder, topology, strikes, overrides=ELASTIC):
    """Args: strikes: steps and (rank, signal) that is sent then. The output."""
    site = Site(folder, topology, overrides)
    session = site.start()
    for step, blows in strikes:
        session.reach(step, 0.0)
        for rank, number in blows:
            os.kill(session.ranks()[rank], number)
    ending = session.wait(0.0)
    assert ending.code == DONE, ending.said
    return site.result(), ending.said


@pytest.mark.slow  # continuous integration runs it nonetheless
@pytest.mark.multiprocess
def test_without_its_main_process_a_run_goes_on_and_has_the_same_bits(tmp_path, monkeypatch):
    """Its steps are small; this process trains the run that it is compared with.

    Later generations find the folder that the first one began, which run.resume=never does not
    forbid, and go on with its mirror.
    """
    small = (*ranks.SMALL, "run.epochs=4")
    site = Site(tmp_path / "alone", Topology(1, 1))
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
    assert (
        train.main(["--config", str(QUICKSTART), *RECIPE, *small, f"run.output={site.run}"]) == DONE
    )
    struck = tmp_path / "struck"
    strikes = [(8, [(0, signal.SIGKILL)])]
    overrides = (*ELASTIC, *small, "run.resume=never", f"checkpoint.mirror={tmp_path / 'mirror'}")
    result, said = run_and_strike(struck, Topology(3, 1), strikes, overrides)
    assert result == site.result()
    there = tmp_path / "mirror"
    here = struck / "run"
    for path in (*here.glob("*.json*"), *here.glob("checkpoints/*")):
        assert (there / path.relative_to(here)).read_bytes() == path.read_bytes()
    assert len(list(there.glob("checkpoints/*"))) == len(list(here.glob("checkpoints/*")))
    assert "of 20 with replicas 1, 2" in said and "resuming" not in said
    # For a report. On a busy machine a slow replica may be missed before the strike, and come back
    # in a generation of its own; after the strike two go on.
    started = [(each["generation"], each["replicas"]) for each in starts(struck / "run")]
    assert started[0] == (0, 3) and 2 in [replicas for _, replicas in started], (started, said)
    assert [number for number, _ in started] == list(range(len(started))), (started, said)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("topology", "strikes"),
    [
        (Topology(3, 1), [(5, [(1, signal.SIGSTOP)]), (20, [(0, signal.SIGKILL)])]),
        (
            Topology(4, 1),
            [(5, [(0, signal.SIGKILL), (2, signal.SIGKILL)]), (15, [(1, signal.SIGKILL)])],
        ),
        (Topology(2, 2), [(15, [(3, signal.SIGKILL)])]),
        (Topology(2, 2), [(15, [(0, signal.SIGSTOP)])]),
        (Topology(3, 2), [(5, [(2, signal.SIGKILL)]), (12, [(1, signal.SIGKILL)])]),
    ],
    ids=str,
)
def test_whoever_is_lost_the_bits_are_the_same(tmp_path, undisturbed, topology, strikes):
    result, said = run_and_strike(tmp_path, topology, strikes)
    assert result == undisturbed
    assert "generation 1" in said and "resuming" not in said


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_replica_comes_back_with_all_others_told_to_stop_then(tmp_path):
    site = Site(tmp_path, Topology(2, 1), (*ELASTIC[:2], "run.epochs=160"))
    session = site.start()
    session.reach(10, 0.0)
    os.kill(session.ranks()[1], signal.SIGKILL)
    wait_until(lambda: "with replicas 0, 1" in session.said())
    session.process.terminate()
    ending = session.wait(0.0)
    assert ending.code == STOPPED, ending.said


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_is_saved_though_it_is_told_to_stop_while_a_replacement_starts(tmp_path):
    """All generations and signals are real here; tests/parallel/test_elastic_signals.py has the
    other moments."""
    site = Site(tmp_path, Topology(2, 1), (*ELASTIC[:2], *ranks.SMALL, "run.epochs=160"))
    session = site.start()
    session.reach(5, 0.0)
    os.kill(session.ranks()[1], signal.SIGKILL)
    wait_until(lambda: "is started anew" in session.said())
    session.process.terminate()
    ending = session.wait(0.0)
    assert ending.code == STOPPED, ending.said
    assert site.checkpoints()[-1].name == f"step-{site.steps():08d}.pt"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_as_it_loads_is_started_again_and_the_bits_are_the_same(
    tmp_path, undisturbed, rank
):
    site = Site(tmp_path, Topology(3, 1), ELASTIC)
    session = site.start()
    wait_until(lambda: len(session.ranks()) == 3)
    os.kill(session.ranks()[rank], signal.SIGKILL)
    ending = session.wait(0.0)
    assert ending.code == DONE, ending.said
    assert site.result() == undisturbed
    assert "the others wait" in ending.said and "generation" not in ending.said


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("delay", [0.0, 0.5, 2.0, 4.0, 6.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_is_told_to_stop_after_a_loss_resumes_to_the_same_bits(
    tmp_path, undisturbed, rank, delay
):
    """A moment after it, while the others regroup, while a replacement loads, waits or is taken
    in."""
    site = Site(tmp_path, Topology(3, 1), ELASTIC)
    session = site.start()
    session.reach(5, 0.0)
    os.kill(session.ranks()[rank], signal.SIGKILL)
    session.reach(0, delay)
    session.process.terminate()
    ending = session.wait(0.0)
    assert ending.code in (STOPPED, DONE), ending.said
    if ending.code == STOPPED:
        assert site.checkpoints()[-1].name >= "step-00000004.pt"
        ending = site.start().wait(0.0)
    assert ending.code == DONE and site.result() == undisturbed, ending.said
