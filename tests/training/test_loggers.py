"""Where else the numbers of a run go: doubles of the two services, which are not in requirements.txt.

The doubles have the functions that are used, with the packages' own names of arguments; where the packages are
installed the last test compares them.
"""

import importlib.machinery
import inspect
import json
import operator
import os
import sys
import types

import pytest

from recipe.errors import DONE, FAILED, STOPPED, ConfigError
from tests.conftest import QUICKSTART, TINY
from train import main
from training import loggers, run
from training.loop import Stopped
from training.services import MlflowLogger, WandbLogger


def module(name, **functions):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="a double")
    vars(made).update(functions)
    return made


class Wandb:
    """What W&B was told, a dictionary for each session; `broken` is raised by whatever it names."""

    def __init__(self):
        self.sessions, self.broken = [], {}
        self.module = module("wandb", init=self.init, Error=type("Error", (Exception,), {}))

    def init(self, *, name, dir, config, id, resume, mode=None):
        session = {"name": name, "dir": dir, "config": config, "id": id, "resume": resume, "mode": mode, "told": []}
        self.fail(mode or "online")
        self.sessions.append(session)
        return WandbRun(self, session)

    def fail(self, place):
        if place in self.broken:
            raise self.broken[place]


class WandbRun:
    def __init__(self, service, session):
        self._service, self._session = service, session
        self.id = session["id"] or f"run-{len(service.sessions)}"

    def log(self, data, step):
        self._service.fail("log")
        self._session["told"].append((step, data))

    def finish(self, exit_code):
        self._service.fail("finish")
        self._session["exit_code"] = exit_code


class Mlflow:
    """What MLflow was told, by run; parameters cannot be changed, as with MLflow."""

    def __init__(self):
        self.runs, self.broken, self._active = {}, {}, None
        self.module = module(
            "mlflow",
            start_run=self.start_run,
            log_params=self.log_params,
            log_metrics=self.log_metrics,
            end_run=self.end_run,
        )

    def start_run(self, run_id, run_name):
        if "start" in self.broken:
            raise self.broken["start"]
        run_id = run_id or f"{len(self.runs):032x}"
        self._active = self.runs.setdefault(run_id, {"name": run_name, "params": {}, "metrics": [], "ends": []})
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_params(self, params):
        assert all(self._active["params"].get(key, value) == value for key, value in params.items())
        self._active["params"].update(params)

    def log_metrics(self, metrics, step):
        assert metrics, "MLflow refuses an empty batch in some stores"
        self._active["metrics"] += [(key, step, value) for key, value in metrics.items()]

    def end_run(self, status):
        self._active["ends"].append(status)


@pytest.fixture
def services(monkeypatch):
    """The doubles in the packages' places; what the services' variables were set to is undone."""
    found = types.SimpleNamespace(wandb=Wandb(), mlflow=Mlflow())
    monkeypatch.setitem(sys.modules, "wandb", found.wandb.module)
    monkeypatch.setitem(sys.modules, "mlflow", found.mlflow.module)
    for name in (*WandbLogger.settings, *MlflowLogger.settings):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return found


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """trained(*overrides): trains eight steps, told of every two, saved and scored every four; the exit code."""
    monkeypatch.setattr("engines.torch_engine.TorchEngine.peak_flops", lambda engine: 1e12)

    def train(*overrides):
        # An epoch of 59 steps: four are 0.068 of it.
        every = ("checkpoint.every_epochs=0.068", "evaluation.every_epochs=0.068")
        return main(["--config", str(QUICKSTART), *TINY, *every, f"run.output={tmp_path / 'run'}", *overrides])

    return train


def events(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


BOTH = ("log.wandb=true", "log.mlflow=true")


def told_to_mlflow(run, name):
    return [(step, value) for key, step, value in run["metrics"] if key == name]


def test_both_services_are_told_what_metrics_jsonl_has(services, trained, tmp_path, capsys):
    assert trained(*BOTH, "data.crop_area=[0.5, 1.0]") == DONE
    (wandb,), (mlflow,) = services.wandb.sessions, services.mlflow.runs.values()
    expected = [(event.pop("step"), loggers.numbers(event.pop("event"), event)) for event in events(tmp_path)]
    assert wandb["told"] == [(step, data) for step, data in expected if data]
    flat = [(key, step, value) for step, data in expected for key, value in data.items()]
    assert mlflow["metrics"] == flat
    assert {key.partition("/")[0] for key, *_ in flat} == {"train", "eval", "end", "trust"}
    assert (wandb["name"], wandb["dir"], mlflow["name"]) == ("quickstart", str(tmp_path / "run"), "quickstart")
    assert (wandb["exit_code"], mlflow["ends"]) == (DONE, ["FINISHED"])
    assert "log." not in capsys.readouterr().out, "nothing failed, so nothing is said"
    # MLflow's values are text, which on a command line would give the same recipe.
    assert (wandb["config"]["batch"]["global"], wandb["config"]["data"]["crop_area"]) == (24, [0.5, 1.0])
    expected = {"batch.global": "24", "data.crop_area": "[0.5, 1.0]", "model.init_from": "null", "log.wandb": "true"}
    assert {key: mlflow["params"][key] for key in expected} == expected
    assert mlflow["params"]["optimizer.name"] == "lars"


@pytest.fixture
def killed_after(monkeypatch):
    """killed_after(kind, step): the next session is killed once that event was told; without arguments none is."""
    event = run.Monitor.event

    def kill(*where):
        def tell(monitor, *arguments):
            event(monitor, *arguments)
            if arguments[:2] == where:
                raise KeyboardInterrupt

        monkeypatch.setattr(run.Monitor, "event", tell)

    return kill


def test_a_killed_run_goes_on_as_the_same_run_and_mlflow_is_told_once(services, trained, tmp_path, killed_after):
    """Killed after step 6 was told, with a checkpoint of step 4; then again after step 8's training line.

    MLflow has each number once. W&B is told again, and drops by itself what it has.
    """
    killed_after("train", 6)
    assert trained(*BOTH) == FAILED
    killed_after("train", 8)
    assert trained(*BOTH) == FAILED
    killed_after()
    assert trained(*BOTH) == DONE
    ((run_id, mlflow),) = services.mlflow.runs.items()
    for kind, key in (("train", "loss"), ("eval", "top1"), ("end", "top1")):
        expected = [(each["step"], each[key]) for each in events(tmp_path) if each["event"] == kind]
        assert told_to_mlflow(mlflow, f"{kind}/{key}") == expected
    assert mlflow["ends"] == ["FAILED", "FAILED", "FINISHED"]
    assert [(one["id"], one["resume"]) for one in services.wandb.sessions] == [(None, None), *[("run-1", "allow")] * 2]
    steps = [[step for step, data in one["told"] if "train/loss" in data] for one in services.wandb.sessions]
    assert steps == [[2, 4, 6], [6, 8], [6, 8]]
    saved = json.loads((tmp_path / "run" / loggers.FILE).read_text())
    assert saved["mlflow"]["run"] == run_id
    assert saved["mlflow"]["steps"] == {"train": 8, "eval": 4, "checkpoint": 4}
    assert saved["wandb"]["run"] == "run-1"


def test_a_service_may_leave_and_join_again(services, trained, killed_after):
    """Its name for the run stays in the folder while it is away."""
    for step, keys in ((2, BOTH), (4, ("log.mlflow=true",))):
        killed_after("train", step)
        assert trained(*keys) == FAILED
    killed_after()
    assert trained(*BOTH) == DONE
    assert [one["id"] for one in services.wandb.sessions] == [None, "run-1"]
    assert len(services.mlflow.runs) == 1


@pytest.mark.parametrize(("mended", "runs"), [("data.workers=1", 1), ("schedule.peak=0.5", 2)])
def test_killed_before_its_first_line_a_run_goes_on_unless_its_recipe_was_mended(
    services, trained, monkeypatch, mended, runs
):
    """Then the services would mix two recipes. What may change in a run at any time changes nothing here either."""

    def killed(trainer, batches):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.Trainer, "run", killed)
        assert trained(*BOTH) == FAILED
    assert trained(*BOTH, mended) == DONE
    assert len(services.mlflow.runs) == runs
    assert services.wandb.sessions[1]["id"] == ("run-1" if runs == 1 else None)
    (*_, last) = services.mlflow.runs.values()
    assert [step for step, _ in told_to_mlflow(last, "train/loss")] == [2, 4, 6, 8]


@pytest.mark.parametrize("content", ["", "[]", '{"wandb": 3}', '{"wandb": {"run": "a", "steps": 5}}'])
def test_a_damaged_note_about_the_services_starts_them_anew(tmp_path, tiny, content):
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 2}\n{"event": "eval", "step": 4}\n')
    (tmp_path / loggers.FILE).write_text('{"mlflow": {"run": "a", "steps": {"train": 6}}}')
    log = tiny("log.wandb=true", "log.mlflow=true").log
    assert loggers.service_states(log, tmp_path) == {"mlflow": loggers.ServiceState("a", {"train": 6, "eval": 4})}
    (tmp_path / loggers.FILE).write_text(content)
    assert loggers.service_states(log, tmp_path) == {}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            {"online": "no key"},
            "log.wandb: no key; written offline, to be sent by `wandb sync RUN/wandb/offline-run-*`",
        ),
        ({"online": "no key", "offline": "full"}, "log.wandb: full; the run goes on without it"),
        ({"log": "lost"}, "log.wandb: lost; the run goes on without it"),
    ],
)
def test_wandb_never_ends_a_run(services, trained, tmp_path, capsys, broken, said):
    """It is said once, however many events follow; and the run is whole."""
    services.wandb.broken = {place: services.wandb.module.Error(f"{text}\nmore") for place, text in broken.items()}
    assert trained("log.wandb=true") == DONE
    lines = [line for line in capsys.readouterr().out.splitlines() if "log.wandb" in line]
    assert lines[-1] == said.replace("RUN", str(tmp_path / "run"))
    assert len(lines) == len([place for place in broken if place != "online"] or [1]) + ("offline" in broken)
    assert events(tmp_path)[-1]["event"] == "end"
    assert [one["mode"] for one in services.wandb.sessions] == (
        [] if "offline" in broken else ["offline"] if "online" in broken else [None]
    )


def test_mlflow_never_ends_a_run(services, trained, tmp_path, capsys):
    """Nor is anything noted of it: the next session tries again."""
    services.mlflow.broken = {"start": RuntimeError("no server at http://127.0.0.1:9")}
    assert trained("log.mlflow=true") == DONE
    said = "log.mlflow: no server at http://127.0.0.1:9; the run goes on without it"
    assert [line for line in capsys.readouterr().out.splitlines() if "log.mlflow" in line] == [said]
    assert not (tmp_path / "run" / loggers.FILE).exists()


def test_a_signal_is_no_failure_to_the_services(services, trained, monkeypatch):
    """The same command resumes: W&B gets the exit code, MLflow its own word for it."""

    def stopped(trainer, batches):
        raise Stopped("SIGTERM")

    monkeypatch.setattr(run.Trainer, "run", stopped)
    assert trained(*BOTH) == STOPPED
    assert services.wandb.sessions[0]["exit_code"] == STOPPED
    assert [one["ends"] for one in services.mlflow.runs.values()] == [["KILLED"]]


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_missing_package_is_one_line_before_anything_is_made(trained, tmp_path, monkeypatch, capsys, name, package):
    monkeypatch.setitem(sys.modules, name, None)
    assert trained(f"log.{name}=true") == 2
    error = capsys.readouterr().err
    assert f"log.{name}: " in error and f"pip install {package}, or log.{name}=false\n" in error
    assert not (tmp_path / "run").exists()


def test_a_folder_called_wandb_is_no_package(tmp_path, monkeypatch, tiny):
    """W&B itself leaves such folders where it is used, and Python imports folders."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="the package wandb is not installed"):
        loggers.check(tiny("log.wandb=true").log)


def test_what_the_user_set_for_the_services_stays(services, trained, monkeypatch):
    monkeypatch.setenv("WANDB_CONSOLE", "wrap")
    trained("log.wandb=true")
    assert (os.environ["WANDB_CONSOLE"], os.environ["WANDB_FINISH_TIMEOUT"]) == ("wrap", "60")


@pytest.mark.parametrize(
    ("package", "doubled"),
    [
        ("wandb", {"init": Wandb.init, "Run.log": WandbRun.log, "Run.finish": WandbRun.finish}),
        ("mlflow", {name: getattr(Mlflow, name) for name in ("start_run", "log_params", "log_metrics", "end_run")}),
    ],
)
def test_the_doubles_take_what_the_packages_take(package, doubled):
    """Every argument of a double is one of the package's, under the same name."""
    real = pytest.importorskip(package)
    for name, double in doubled.items():
        ours, theirs = (inspect.signature(each).parameters for each in (double, operator.attrgetter(name)(real)))
        assert set(ours) - {"self"} <= set(theirs), name
    if package == "wandb":
        assert issubclass(real.Error, Exception) and hasattr(real.Run, "id")
