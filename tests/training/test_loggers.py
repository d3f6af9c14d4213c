"""Loggers of services, whose packages are not in requirements.txt: doubles have the functions that
are used."""

import importlib.machinery
import json
import sys
import types

import pytest

from common.errors import DONE, FAILED, STOPPED
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
    """What W&B received, a dictionary for each session; `broken`: operation -> the error that it
    raises."""

    def __init__(self):
        self.sessions = []
        self.broken = {}
        self.module = module("wandb", init=self.init, Error=type("Error", (Exception,), {}))

    def init(self, *, mode=None, **about):
        session = {**about, "mode": mode, "told": []}
        self.fail(mode or "online")
        self.sessions.append(session)

        def log(data, step):
            self.fail("log")
            session["told"].append((step, data))

        def finish(exit_code):
            session["exit_code"] = exit_code

        return types.SimpleNamespace(
            log=log, finish=finish, id=about["id"] or f"run-{len(self.sessions)}"
        )

    def fail(self, operation):
        if operation in self.broken:
            raise self.module.Error(f"{self.broken[operation]}\nmore")


class Mlflow:
    """What MLflow received, by run; parameters cannot be changed, as with MLflow."""

    def __init__(self):
        self.runs = {}
        self.broken = {}
        self._active = None
        names = ("start_run", "log_params", "log_metrics", "end_run")
        self.module = module("mlflow", **{name: getattr(self, name) for name in names})

    def start_run(self, run_id, run_name):
        if self.broken:
            raise RuntimeError(self.broken["start"])
        run_id = run_id or f"{len(self.runs):032x}"
        self._active = self.runs.setdefault(
            run_id, {"name": run_name, "params": {}, "metrics": [], "ends": []}
        )
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
    """The doubles in the packages' places, and no variables of the services."""
    found = types.SimpleNamespace(wandb=Wandb(), mlflow=Mlflow())
    monkeypatch.setitem(sys.modules, "wandb", found.wandb.module)
    monkeypatch.setitem(sys.modules, "mlflow", found.mlflow.module)
    for name in (*WandbLogger.settings, *MlflowLogger.settings):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return found


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """trained(*overrides): trains eight steps, told of every two, saved and scored every four; the
    exit code."""
    monkeypatch.setattr("engines.torch_engine.TorchEngine.peak_flops", lambda engine: 1e12)

    def train(*overrides):
        # An epoch of 59 steps: four are 0.068 of it.
        every = ("checkpoint.every_epochs=0.068", "evaluation.every_epochs=0.068")
        return main(
            [
                "--config",
                str(QUICKSTART),
                *TINY,
                *every,
                f"run.output={tmp_path / 'run'}",
                *overrides,
            ]
        )

    return train


@pytest.fixture
def events(tmp_path):
    return lambda: [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]


BOTH = ("log.wandb=true", "log.mlflow=true")


def test_both_services_receive_what_metrics_jsonl_has(services, trained, events, tmp_path, capsys):
    assert trained(*BOTH, "data.crop_area=[0.5, 1.0]") == DONE
    (wandb,), (mlflow,) = services.wandb.sessions, services.mlflow.runs.values()
    expected = [
        (event.pop("step"), loggers.numbers(event.pop("event"), event)) for event in events()
    ]
    assert wandb["told"] == [(step, data) for step, data in expected if data]
    flat = [(key, step, value) for step, data in expected for key, value in data.items()]
    assert mlflow["metrics"] == flat
    assert {key.partition("/")[0] for key, *_ in flat} == {"train", "eval", "end", "trust"}
    assert (wandb["name"], wandb["dir"], mlflow["name"]) == (
        "quickstart",
        str(tmp_path / "run"),
        "quickstart",
    )
    assert (wandb["exit_code"], mlflow["ends"]) == (DONE, ["FINISHED"])
    assert "log." not in capsys.readouterr().out, "nothing failed, so nothing is said"
    # MLflow's values are text, which on a command line would give the same recipe.
    assert (wandb["config"]["batch"]["global"], wandb["config"]["data"]["crop_area"]) == (
        24,
        [0.5, 1.0],
    )
    expected = {
        "batch.global": "24",
        "data.crop_area": "[0.5, 1.0]",
        "model.init_from": "null",
        "log.wandb": "true",
    }
    assert {key: mlflow["params"][key] for key in expected} == expected
    assert mlflow["params"]["optimizer.name"] == "lars"


def test_a_killed_run_goes_on_as_the_same_run_and_mlflow_gets_each_number_once(
    services, trained, events, tmp_path, monkeypatch
):
    """Killed after the event of step 6, with a checkpoint of step 4; then again after step 8's
    training line."""
    event = run.Monitor.event
    for killed, code in ((("train", 6), FAILED), (("train", 8), FAILED), ((), DONE)):

        def tell(monitor, *arguments, killed=killed):
            event(monitor, *arguments)
            if arguments[:2] == killed:
                raise KeyboardInterrupt

        monkeypatch.setattr(run.Monitor, "event", tell)
        assert trained(*BOTH) == code
    ((run_id, mlflow),) = services.mlflow.runs.items()
    for kind, key in (("train", "loss"), ("eval", "top1"), ("end", "top1")):
        expected = [(each["step"], each[key]) for each in events() if each["event"] == kind]
        assert [
            (step, value) for name, step, value in mlflow["metrics"] if name == f"{kind}/{key}"
        ] == expected
    assert mlflow["ends"] == ["FAILED", "FAILED", "FINISHED"]
    assert [(one["id"], one["resume"]) for one in services.wandb.sessions] == [
        (None, None),
        *[("run-1", "allow")] * 2,
    ]
    steps = [
        [step for step, data in one["told"] if "train/loss" in data]
        for one in services.wandb.sessions
    ]
    assert steps == [[2, 4, 6], [6, 8], [6, 8]]
    saved = json.loads((tmp_path / "run" / loggers.FILE).read_text())
    assert (saved["mlflow"]["run"], saved["wandb"]["run"]) == (run_id, "run-1")
    assert saved["mlflow"]["steps"] == {"train": 8, "eval": 4, "checkpoint": 4}


def ended_by(error):
    def end(trainer, batches):
        raise error

    return end


@pytest.mark.parametrize(("mended", "runs"), [("data.workers=1", 1), ("schedule.peak=0.5", 2)])
def test_killed_before_its_first_line_a_run_goes_on_unless_its_recipe_was_mended(
    services, trained, monkeypatch, mended, runs
):
    """Then the services would mix two recipes.

    What may change in a run at any time changes nothing here either.

    A signal is no failure to the services, as the same command resumes: W&B gets the exit code,
    MLflow its own word.
    """
    with monkeypatch.context() as patch:
        for error, code in ((KeyboardInterrupt(), FAILED), (Stopped("SIGTERM"), STOPPED)):
            patch.setattr(run.Trainer, "run", ended_by(error))
            assert trained(*BOTH) == code
    assert trained(*BOTH, mended) == DONE
    assert [each["exit_code"] for each in services.wandb.sessions] == [FAILED, STOPPED, DONE]
    assert [each["id"] for each in services.wandb.sessions] == [
        None,
        "run-1",
        "run-1" if runs == 1 else None,
    ]
    ends = [["FAILED", "KILLED", "FINISHED"]] if runs == 1 else [["FAILED", "KILLED"], ["FINISHED"]]
    assert [each["ends"] for each in services.mlflow.runs.values()] == ends
    (*_, last) = services.mlflow.runs.values()
    assert [step for name, step, _ in last["metrics"] if name == "train/loss"] == [2, 4, 6, 8]


def test_a_run_that_has_accepted_other_images_goes_on_as_the_same_run(services, tmp_path, tiny):
    """Also in the session after it, which need not accept them again."""
    recipe = (
        f"run.output={tmp_path}",
        "data.source=folder",
        f"data.root={tmp_path}",
        "log.wandb=true",
    )
    accepted = "data.changed_images=accept"
    for overrides in (
        ["data.train_images=60"],
        ["data.train_images=61", accepted],
        ["data.train_images=61"],
    ):
        loggers.start(tiny(*recipe, *overrides), 2, print)
    assert [each["id"] for each in services.wandb.sessions] == [None, "run-1", "run-1"]


def test_a_damaged_note_about_the_services_starts_them_anew(tmp_path, tiny):
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "train", "step": 2}\n{"event": "eval", "step": 4}\n'
    )
    (tmp_path / loggers.FILE).write_text('{"mlflow": {"run": "a", "steps": {"train": 6}}}')
    expected = {"mlflow": loggers.ServiceState("a", {"train": 6, "eval": 4})}
    assert loggers.service_states(tiny(*BOTH), tmp_path) == expected
    for content in ("", "[]", '{"wandb": 3}', '{"wandb": {"run": "a", "steps": 5}}'):
        (tmp_path / loggers.FILE).write_text(content)
        assert loggers.service_states(tiny(*BOTH), tmp_path) == {}


@pytest.mark.parametrize(
    ("service", "broken", "line"),
    [
        (
            "wandb",
            {"online": "no key"},
            "no key; written offline, to be sent by `wandb sync RUN/wandb/offline-run-*`",
        ),
        ("wandb", {"log": "lost"}, "lost; the run goes on without it"),
        ("mlflow", {"start": "no server"}, "no server; the run goes on without it"),
    ],
)
def test_a_service_never_ends_a_run(
    services, trained, events, tmp_path, capsys, service, broken, line
):
    """Its failure is reported once, however many events follow."""
    getattr(services, service).broken = broken
    assert trained(f"log.{service}=true") == DONE
    reported = [line for line in capsys.readouterr().out.splitlines() if f"log.{service}" in line]
    assert reported == [f"log.{service}: {line}".replace("RUN", str(tmp_path / "run"))]
    assert events()[-1]["event"] == "end"
    assert [one["mode"] for one in services.wandb.sessions] == {
        "online": ["offline"],
        "log": [None],
    }.get(*broken, [])
    assert (tmp_path / "run" / loggers.FILE).exists() == (service == "wandb")


@pytest.mark.parametrize(
    ("name", "package"),
    [("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("tensorboard", "tensorboard")],
)
def test_a_missing_package_is_one_line_before_anything_is_made(
    trained, tmp_path, monkeypatch, capsys, name, package
):
    monkeypatch.setitem(sys.modules, name, None)
    assert trained(f"log.{name}=true") == 2
    assert f"pip install {package}, or log.{name}=false\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
