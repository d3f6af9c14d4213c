"""Credentials in data.root reach the server that asks for them, and no file, service or line of
output."""

import base64
import re
import signal
import sys
import zipfile

import pytest

pytest.importorskip("aiohttp", reason="fsspec needs it for http")

import evaluate
import train
from common import credentials
from engines.torch_engine import TorchEngine
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.data.http_server import serving
from tests.data.tar_shards import write_shards
from tests.tools.sweeping import sweeps
from tests.train_command import before_step
from tests.training.test_loggers import Mlflow, Wandb
from tools import export, report, sweep
from training.services import MlflowLogger, WandbLogger

__all__ = ["before_step"]  # a fixture
DONE = 0
WRONG_INPUT = 2
USER = "carol"
PASSWORD = "hunter2/secret"  # percent-encoded in URLs
TOKEN = "c2lnbmF0dXJl"
LOGIN = f"{USER}:{PASSWORD}"
QUERY = f"sv=2024&sig={TOKEN}"
SECRETS = re.compile(
    "|".join(
        (PASSWORD, "hunter2", TOKEN, base64.b64encode(LOGIN.encode()).decode().rstrip("="))
    ).encode()
)


@pytest.fixture(autouse=True)
def _no_others(monkeypatch, tmp_path):
    monkeypatch.setattr(credentials, "_known", {})
    monkeypatch.delenv(credentials.ENVIRONMENT, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        write_shards(folder / split, (20, 10))
    return folder


@pytest.fixture
def server(images):
    with serving(images) as running:
        running.login = LOGIN
        running.query = QUERY
        yield running


def with_credentials(url):
    return f"{url.replace('//', f'//{USER}:hunter2%2Fsecret@')}?{QUERY}"


def secrets_below(folder):
    """The files below a folder that have a secret in their names, their contents, or packed in an
    archive."""
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        parts = [str(path).encode(), path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                parts += [archive.read(name) for name in archive.namelist()]
        found += [path] if any(map(SECRETS.search, parts)) else []
    return found


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """call(main, *arguments): exit code and output of a command, which has no secret."""

    def called(main, *arguments):
        monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, arguments)])
        capfd.readouterr()
        code = main(list(map(str, arguments)))
        said = "".join(capfd.readouterr())
        assert not SECRETS.search(said.encode()), said
        assert code != DONE or not any(SECRETS.search(word.encode()) for word in sys.argv)
        return code, said

    return called


def recipe(root, output, *more):
    overrides = (
        *TINY,
        "data.source=shards",
        f"data.root={root}",
        "model.classes=2",
        "batch.global=6",
        "batch.micro=6",
    )
    overrides = (
        *overrides,
        "run.steps=4",
        "data.workers=1",
        "checkpoint.every_epochs=0.2",
        f"run.output={output}",
    )
    return ("--config", QUICKSTART, *overrides, *more)


def test_no_file_service_or_line_has_them(server, call, tmp_path, monkeypatch):
    """A run with all loggers, its scores, its export and its report."""
    wandb = Wandb()
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb.module)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    for name, value in {**WandbLogger.settings, **MlflowLogger.settings}.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    url = with_credentials(server.url)
    assert (
        call(
            train.main,
            *recipe(url, run, "log.wandb=true", "log.mlflow=true", "log.tensorboard=true"),
        )[0]
        == DONE
    )
    assert server.url in (run / "config.yaml").read_text()
    assert f"data.root={server.url}" in (run / "environment.json").read_text()
    assert call(evaluate.main, "--checkpoint", run, f"data.root={url}")[0] == DONE
    assert call(export.main, run, "--format", "safetensors")[0] == DONE
    assert call(report.main, run)[0] == DONE
    assert len(list(run.rglob("*"))) > 12 and not secrets_below(run)
    received = repr((wandb.sessions, mlflow.runs))
    assert server.url in received and not SECRETS.search(received.encode())
    for name in ("environment.json", "config.yaml"):  # older versions stored what they were given
        (run / name).write_text((run / name).read_text().replace(server.url, url))
    assert (
        call(report.main, run)[0] == DONE
        and call(export.main, run, "--format", "safetensors")[0] == DONE
    )


def test_a_run_is_resumed_with_those_that_it_is_given_again(
    server, call, tmp_path, monkeypatch, before_step
):
    """From the command line, the environment or ~/.netrc: all are the same run."""

    def until(step, root):
        before_step(step, signal.raise_signal, signal.SIGTERM)
        code, said = call(train.main, *recipe(root, run))
        before_step(0, None)
        assert code == 75
        return said

    server.query = None
    run = tmp_path / "run"
    url = with_credentials(server.url).partition("?")[0]
    assert call(train.main, *recipe(url, run), "--dry-run")[0] == DONE
    until(2, url)
    credentials._known.clear()
    code, said = call(train.main, *recipe(server.url, run))
    assert code == WRONG_INPUT and "401" in said and credentials.ENVIRONMENT in said
    monkeypatch.setenv(credentials.ENVIRONMENT, url)
    assert "resuming at step 2 of 4" in until(3, server.url)
    monkeypatch.delenv(credentials.ENVIRONMENT)
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login {USER} password {PASSWORD}\n")
    code, said = call(train.main, *recipe(server.url, run))
    assert code == DONE and "resuming at step 3 of 4" in said
    assert not secrets_below(run)


@pytest.mark.parametrize("status", [401, 404])
def test_no_fault_of_a_server_shows_them(server, call, tmp_path, status):
    server.always["train/shards.json"] = status
    code, said = call(train.main, *recipe(with_credentials(server.url), tmp_path / "run"))
    assert code == WRONG_INPUT and f"{server.url}/train/shards.json: " in said
    assert not secrets_below(tmp_path)


def test_trials_of_a_sweep_have_them_and_its_files_do_not(server, call, tmp_path):
    url = with_credentials(server.url)
    folder = tmp_path / "sweep"
    definition = tmp_path / "some.yaml"
    trainer = tmp_path / "trainer.py"
    definition.write_text(sweeps.FILE.format(recipe=QUICKSTART, metric="top1", more="pruner: none"))
    trainer.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.tools.sweeping import double\n"
        f"assert os.environ[{credentials.ENVIRONMENT!r}] == {url!r}\nassert {TOKEN!r} not in str(sys.argv)\n"
        "sys.exit(double.main(sys.argv[1:]))\n"
    )

    def main(arguments):
        return sweep.main(arguments, trainer=[str(trainer)])

    arguments = (
        "--config",
        definition,
        "--output",
        folder,
        "--trials",
        1,
        "data.source=shards",
        f"data.root={url}",
    )
    assert call(main, *arguments)[0] == DONE
    assert server.url in (folder / "best.yaml").read_text()
    assert not secrets_below(folder)
    text = sweeps.FILE.format(recipe=QUICKSTART, metric="top1", more="")
    definition.write_text(f"{text}  data.root: {{choices: ['{url}', /images]}}\n")
    code, said = call(sweep.main, "--config", definition, "--output", tmp_path / "other")
    assert code == WRONG_INPUT and "space: data.root: choices are stored" in said
