"""CPU or CUDA: the device of a recipe, its dtype, memory and speed, and torch's switches for repeatability."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Iterator, List, Tuple

import torch

from common.errors import ConfigError
from parallel.topology import Topology

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SUPPORTED = "supported are NVIDIA GPUs (cuda), CPUs and IPUs"
# Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS repeats bit for bit, by its documentation.
_REPEATING = (":4096:8", ":16:8")


def device_of(wanted: str, topology: Topology) -> torch.device:
    """Return the device of this process: each process on a host has a GPU of its own.

    Args:
        wanted: `run.device`, other than "ipu".
        topology: which process this is.

    Raises:
        ConfigError: no CUDA device, or fewer than processes on this host; PyTorch for ROCm, unless
            the CPU is named.
    """
    available = torch.cuda.is_available()
    if wanted != "cpu" and torch.version.hip:  # its devices are called cuda, too
        raise ConfigError(
            f"run.device {wanted}: this PyTorch is for ROCm; {_SUPPORTED}; use run.device=cpu"
        )
    if wanted == "cuda" and not available:
        raise ConfigError(
            "run.device cuda: PyTorch finds no CUDA device here; use run.device=cpu or auto"
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    # The current GPU, which the user of a library may have set.
    if topology.world == 1:
        return torch.device("cuda")
    # One GPU for each rank of this host, by its number there.
    devices = torch.cuda.device_count()
    if topology.local_rank >= devices:
        raise ConfigError(
            f"process {topology.local_rank + 1} on this host has no GPU, there are {devices}: NCCL "
            "cannot run two ranks on one; start fewer processes, or use run.device=cpu"
        )
    return torch.device("cuda", topology.local_rank)


def unused(wanted: str) -> Tuple[str, ...]:
    """Return a line for the user if `auto` leaves out a GPU that PyTorch has found here.

    Args:
        wanted: `run.device`.
    """
    if wanted != "auto" or torch.cuda.is_available():
        return ()
    backends = {
        "Apple's GPU (MPS)": torch.backends.mps,
        "Intel's GPU (XPU)": getattr(torch, "xpu", None),  # from torch 2.3 on
    }
    lines = []
    for name, backend in backends.items():
        if backend is not None and backend.is_available():
            lines.append(f"run.device auto: the CPU computes, {name} does not; {_SUPPORTED}")
    return tuple(lines)


def name_of(device: torch.device) -> str:
    """Return the kind of `device`, as `NVIDIA H200` or `cpu`.

    Devices of a kind are equally fast, and add in the same order.
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronize(device: torch.device) -> None:
    """Wait until a `device` has no work left."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds that a device computes within some blocks; nothing waits until they are read."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: List[tuple] = []  # before and after each block

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure the time of a block."""
        before = self._mark()
        yield
        self._marks.append((before, self._mark()))

    def read(self) -> Tuple[float, int]:
        """Return the seconds in blocks since the last call, and how many these are.

        Waits for the device.
        """
        # An event has no time before the device has passed it.
        synchronize(self._device)
        marks = self._marks
        self._marks = []
        if self._device.type == "cuda":
            milliseconds = sum(before.elapsed_time(after) for before, after in marks)
            return milliseconds / 1000, len(marks)
        return sum(after - before for before, after in marks), len(marks)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        # The device notes the time as it gets there: nothing waits here.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def compute_dtype(compute: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and working weights.

    Args:
        compute: `precision.compute`.
        device: that computes; `auto` depends on it.
    """
    if compute == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return DTYPES[compute]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a `dtype` without torch's, as `float16`."""
    return str(dtype).split(".")[1]


def set_switches(deterministic: bool) -> None:
    """Set the process-wide switches of torch.

    Shapes seldom change within a run, so cuDNN may search for kernels. float32 is IEEE's in every
    kernel, so that the choice of one changes no more than rounding.

    Args:
        deterministic: whether runs repeat bit for bit.

    Raises:
        ConfigError: cuBLAS would not repeat: it reads its variable only once, as CUDA starts.
    """
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    # TensorFloat32 has 10 bits of mantissa: kernels would differ by more than rounding.
    torch.backends.cudnn.allow_tf32 = False  # as for matrix products, by default
    if deterministic:
        _check_cublas()
        torch.use_deterministic_algorithms(True)


def _check_cublas() -> None:
    """Set cuBLAS's variable while that counts.

    Commands have it from their beginning, other programs may not.
    """
    wanted = " or ".join(_REPEATING)
    given = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if given is None and torch.cuda.is_initialized():
        raise ConfigError(
            f"run.deterministic: CUDA has started without CUBLAS_WORKSPACE_CONFIG; set it to {wanted} before"
        )
    if given not in (None, *_REPEATING):
        raise ConfigError(
            f"run.deterministic: CUBLAS_WORKSPACE_CONFIG is {given}; set it to {wanted}, or unset it"
        )
    # Unset, and CUDA has not started: cuBLAS will read this value.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _REPEATING[0])


def timed(work: Callable[[], object], device: torch.device, calls: int) -> List[float]:
    """Return the seconds of each of some calls, until the device is done.

    Args:
        work: to be called; the first calls warm caches and compilers.
        device: that computes.
        calls: how many.
    """
    seconds = []
    # Calls return before a GPU has computed: it is waited for on both sides.
    for _ in range(calls):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def memory_of(device: torch.device) -> int:
    """Return the bytes that this process may count on.

    Args:
        device: a GPU, of which all that is free counts, or a CPU, of whose free memory each process
            on the host has a share.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Processes of a host take from the same memory.
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
