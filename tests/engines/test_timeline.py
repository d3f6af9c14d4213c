"""Spans of the timeline that profilers are told: by name, and without waiting for the device."""

import contextlib

import pytest
import torch

from engines import timeline
from engines.base import one_step
from engines.timeline import Recorder
from parallel.processes import Processes
from parallel.topology import Topology

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture
def told(monkeypatch):
    """Names in the order in which ranges of NVTX begin and end, and `wait` where the device is
    waited for."""
    found = []

    @contextlib.contextmanager
    def nvtx(name):
        found.append(name)
        yield
        found.append(f"/{name}")

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    monkeypatch.setattr(timeline, "synchronize", lambda device: found.append("wait"))
    return found


def spans(recorder):
    with recorder.span("forward", 3), recorder.span("exchange"):
        pass


def test_named_spans_are_ranges_of_nvtx_on_cuda_and_nothing_waits(told):
    recorder = Recorder(Processes(Topology(), CPU), GPU)
    recorder.named = True
    spans(recorder)
    assert told == ["forward 3", "exchange", "/exchange", "/forward 3"]
    assert recorder.collect() == []


@pytest.mark.parametrize("named", [False, True])
def test_recorded_spans_wait_whether_they_are_named_or_not(told, named):
    recorder = Recorder(Processes(Topology(), CPU), GPU, updates=1)
    recorder.named = named
    recorder.begin(one_step(4))  # the first of a session, which starts what is new
    recorder.begin(one_step(5))
    spans(recorder)
    assert told.count("wait") == 4 and len(told) == 4 + 4 * named
    assert [(span.kind, span.micro_batch, span.step) for span in recorder.collect()] == [
        ("exchange", -1, 5), ("forward", 3, 5),
    ]  # fmt: skip


def test_a_cpu_has_no_nvtx_and_without_a_profile_no_span_is_named(told):
    for device, named in ((CPU, True), (GPU, False)):
        recorder = Recorder(Processes(Topology(), CPU), device)
        recorder.named = named
        spans(recorder)
    assert told == []
