"""Commands as tests call them."""

import pytest

from common import progress


@pytest.fixture
def call(capsys, undrawn_confusion):
    """call(main, *arguments): exit code, lines of stdout, lines of stderr."""

    def called(main, *arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return called


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch):
    """Lines that a command prints after ten seconds would be others on a busy machine."""
    monkeypatch.setattr(progress, "EVERY", 3600.0)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("POPDIST_NUM_IPUS_PER_REPLICA", raising=False)
