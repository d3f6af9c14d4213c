"""Launchers in processes of their own.

They are forked from a server that has loaded torch, so one costs no seconds.
"""

import ctypes
import os
import sys
from pathlib import Path

from parallel.parent_death import die_with_parent
from tests.conftest import QUICKSTART, ROOT
from tests.world import fork_server

# A launcher sets this before it loads torch, which the server has done already.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class Launcher:
    """`./run_pod.sh ARGUMENTS` whose ranks run `program`, in a session of its own.

    folder: for what it prints.
    seconds: attributes of parallel.hosts and parallel.rendezvous that are to be shorter.
    namespace: of the network.
    environment: further variables; those of SLURM and torch are not inherited.
    """

    def __init__(self, folder, program, *arguments, seconds=None, namespace=None, **environment):
        others = ("SLURM", "OMP", "GLOO", "TORCH")
        inherited = {name: os.environ[name] for name in os.environ if not name.startswith(others)}
        variables = {**inherited, "POD_TOKEN": "of these tests", **environment}
        number = len(list(folder.glob("*.out")))
        self._files = [folder / f"launcher-{number}.{name}" for name in ("out", "err")]
        for file in self._files:
            file.touch()
        target = (
            str(program),
            [*map(str, arguments)],
            self._files,
            seconds or {},
            namespace,
            variables,
        )
        self._process = fork_server().Process(target=_launch, args=target)
        self._process.start()
        self.pid = self._process.pid

    def running(self):
        return self._process.exitcode is None

    def errors(self):
        return self._files[1].read_text().splitlines()

    def send(self, number):
        os.kill(self.pid, number)

    def end(self, timeout=120):
        """Exit code, lines of stdout, lines of stderr."""
        self._process.join(timeout)
        assert not self.running(), (timeout, self.errors())
        return self._process.exitcode, self._files[0].read_text().splitlines(), self.errors()

    def kill(self):
        self._process.kill()
        self._process.join()


def _launch(program, arguments, files, seconds, namespace, variables):
    die_with_parent()
    os.setsid()
    os.chdir(ROOT)
    if namespace is not None:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    for stream, file in zip((1, 2), files):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(variables)
    from parallel import hosts, rendezvous
    from tools import launch

    for name, value in seconds.items():
        setattr(hosts if hasattr(hosts, name) else rendezvous, name, value)
    sys.exit(launch.main(["--config", str(QUICKSTART), *arguments], program=Path(program)))
