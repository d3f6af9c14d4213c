"""Engines that launch Triton's kernels without a GPU, in processes of their own: the tests' own
interprets kernels.

Each command prints one object of JSON:

    python -m tests.engines.launches programs OVERRIDE...
        what dry passes and what a whole step launch
    python -m tests.engines.launches interpreted OVERRIDE...
        what the interpreter launches in a whole step
    python -m tests.engines.launches hits COUNT OVERRIDE...
        whether launches find what workers have compiled
"""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

import optim.lars
from data.batches import MicroBatch
from engines import ahead, factory, torch_engine, tuning
from engines.base import one_step
from optim.kernels.lars import TritonLarsUpdate
from recipe import loading
from recipe.batch import divide
from tests.test_gpu_path import Waits

ROOT = Path(__file__).resolve().parents[2]
META = torch.device("meta")


class _Driver:
    """Triton's driver of a GPU with compute capability 9.0 that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class _AsOnGpus(TorchDispatchMode):
    """Convolutions keep the layout of their input, as cuDNN's do; on the meta device all are
    contiguous."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.convolution.default and _is_channels_last(args[0]):
            return result.contiguous(memory_format=torch.channels_last)
        if function is torch.ops.aten.convolution_backward.default and _is_channels_last(args[1]):
            dx, *rest = result
            return (None if dx is None else dx.contiguous(memory_format=torch.channels_last), *rest)
        return result


def _is_channels_last(x):
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def engine_of(overrides, device):
    """An engine of configs/gpu.yaml that launches our kernels on a device that is no GPU, and its
    recipe."""
    apply = tuning.apply
    torch_engine.device_of = lambda *_: device
    tuning.check = lambda *_: None
    tuning.apply = lambda model, section, _: apply(model, section, torch.device("cuda"))
    optim.lars.update_class = lambda _: TritonLarsUpdate
    plan = loading.load(ROOT / "configs" / "gpu.yaml", ["engine.kernels=triton", *overrides])
    return factory.create(plan, divide(plan), steps_per_epoch=100), plan


def step(engine, plan):
    """Train a step of two micro batches, and score one."""
    device = engine.device
    size = plan.model.image_size
    rows = plan.batch.micro
    labels = torch.zeros(max(rows, plan.batch.evaluation), dtype=torch.int64)

    def batch(count, number):
        images = torch.zeros(count, 3, size, size, dtype=torch.uint8, device=device)
        locked = labels[:count].pin_memory() if device == META else labels[:count]
        return MicroBatch(
            images, locked, labels[:count], valid=count, number=number, step=0, unreadable=()
        )

    with contextlib.ExitStack() as stack:
        if device == META:
            stack.enter_context(Waits())
            stack.enter_context(_AsOnGpus())
        engine.train_step(iter([batch(rows, 0), batch(rows, 1)]), one_step(1), 0.1, measure=True)
        engine.evaluate_step(batch(plan.batch.evaluation, 0))


def dry_passes(engine):
    """The programs of an engine's dry passes."""
    with _AsOnGpus():
        return ahead.recorded(engine._dry_passes)


def programs(*overrides):
    """The descriptions of programs of dry passes, and of a whole step; and the notes of an engine
    on a GPU."""
    engine, plan = engine_of(overrides, META)
    found = {"dry": dry_passes(engine), "step": ahead.recorded(lambda: step(engine, plan))}
    # What its constructor does on a GPU.
    engine.device = torch.device("cuda")
    with mock.patch.object(ahead, "prepared", lambda work: (f"prepared by {work.__name__}",)):
        engine._compile()
    return {**found, "notes": engine.notes}


def interpreted(*overrides):
    """The descriptions of the programs of a whole step whose kernels the interpreter computes, from
    a CPU's memory."""
    from triton.runtime.interpreter import InterpretedFunction

    jitted = {}
    run = InterpretedFunction.run

    def launch(kernel, *values, grid, warmup, **named):
        if kernel not in jitted:
            jitted[kernel] = triton.JITFunction(kernel.fn, **kernel.kwargs)
        jitted[kernel].run(*values, grid=grid, warmup=True, **named)
        return run(kernel, *values, grid=grid, warmup=warmup, **named)

    engine, plan = engine_of(overrides, torch.device("cpu"))
    engine.weights._update.host_may_read = False
    before = engine.weights.flat.clone()
    with mock.patch.object(InterpretedFunction, "run", launch):
        found = ahead.recorded(lambda: step(engine, plan))
    changed = not torch.equal(engine.weights.flat, before) and bool(
        engine.weights.flat.isfinite().all()
    )
    return {"step": found, "changed": changed}


def hits(count, *overrides):
    """For each launch of some programs that a worker has compiled: whether Triton's cache had
    it."""
    engine, plan = engine_of(overrides, META)
    by_kernel = {}
    for program in dry_passes(engine).programs:
        by_kernel[json.loads(json.loads(program)["description"])["name"]] = program
    chosen = [by_kernel[name] for name in sorted(by_kernel)][:: -(-len(by_kernel) // int(count))]
    known = ahead._Known()
    unknown = known.without(chosen)
    faults = ahead.compiled(chosen, 1)
    known.add(chosen)
    left = ahead._Known().without(chosen)
    found = {}

    def listen(src, metadata, metadata_group, times, cache_hit):
        found[f"{src.fn.__module__}.{src.name}"] = cache_hit

    run = triton.JITFunction.run

    def compile_only(kernel, *values, grid, warmup, **named):
        return run(kernel, *values, grid=grid, warmup=True, **named)

    triton.knobs.compilation.listener = listen
    descriptions = [json.loads(program)["description"] for program in chosen]
    triton.knobs.runtime.jit_cache_hook = lambda **call: (
        call["compile"]["specialization_data"] not in descriptions
    )
    with mock.patch.object(triton.JITFunction, "run", compile_only):
        step(engine, plan)
    return {
        "faults": list(faults.values()),
        "hits": found,
        "unknown": len(unknown),
        "left": len(left),
    }


if __name__ == "__main__":
    triton.runtime.driver.set_active(_Driver())
    command, *arguments = sys.argv[1:]
    print(
        json.dumps(
            {"programs": programs, "interpreted": interpreted, "hits": hits}[command](*arguments)
        )
    )
