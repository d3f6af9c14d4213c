"""poptorch.DataLoader in the mode AsyncRebatched (PopTorch 3.4, python/__init__.py and
python/_dataloader.py)."""

import atexit
import contextlib
import faulthandler
import inspect
import itertools
import signal

import torch
from signatures import poptorch
from torch import multiprocessing

_OVERWRITE = "the last one may be overwritten"
_SHUTDOWN = "no more are wanted"


class DataLoader:
    """Iterates once over batches for a whole call, which a process of its own reads into
    `buffer_size` buffers; what they hold is overwritten some batches later."""

    def __init__(
        self, options, dataset, batch_size=1, shuffle=None, num_workers=0, drop_last=True,
        persistent_workers=None, auto_distributed_partitioning=True, mode=poptorch.DataLoaderMode.Sync,
        async_options=None, rebatched_worker_size=None, batch_sampler=None, **kwargs,
    ):  # fmt: skip
        options.frozen = True
        size = batch_size * options.micro_batches
        assert mode == poptorch.DataLoaderMode.AsyncRebatched and not (
            shuffle or batch_sampler or persistent_workers
        )
        assert not auto_distributed_partitioning, "the double reads all of a data set"
        assert rebatched_worker_size is None or rebatched_worker_size <= size, (
            f"The rebatched_worker_size ({rebatched_worker_size}) must be <= to the combined batch size ({size})"
        )
        accessor = inspect.signature(poptorch.AsynchronousDataAccessor).bind(
            dataset, **(async_options or {})
        )
        accessor.apply_defaults()
        batches = torch.utils.data.DataLoader(
            dataset, size, num_workers=num_workers, drop_last=drop_last, **kwargs
        )
        context = multiprocessing.get_context("forkserver")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(
            target=_fill, args=(far_end, batches, accessor.arguments["buffer_size"])
        )
        self._process.start()
        far_end.close()
        atexit.register(self.terminate)
        self._taken, self._buffers = 0, self._pipe.recv()

    def terminate(self):
        """Ends the process, by force where it does not answer.

        The real one waits for 20 seconds before.

        It is told to end: workers that were forked meanwhile hold the pipe open, too.
        """
        if self._process is not None:
            with contextlib.suppress(ConnectionError):
                self._pipe.send(_SHUTDOWN)
            self._pipe.close()
            self._process.join(timeout=5)
            self._process.terminate()
            self._process.join()
            self._process = None

    def __iter__(self):
        return self

    def __next__(self):
        assert self._process is not None
        try:
            if self._taken:
                self._pipe.send(_OVERWRITE)
            slot, rows = self._pipe.recv()
        except (EOFError, ConnectionError):
            # a process that ended without an error is waited for, as by the real one
            while True:
                self._process.join(timeout=0.1)
                assert self._process.exitcode in (None, 0), "An error occurred in the data fetcher"
        if not rows:
            raise StopIteration
        self._taken += 1
        return [tensor[:rows] for tensor in self._buffers[slot]]


def _fill(pipe, batches, slots):
    """The process: fills its buffers in turn, and again once they are free. SIGINT is no error."""
    faulthandler.register(signal.SIGTERM, chain=True)
    with contextlib.suppress(KeyboardInterrupt, EOFError, ConnectionError):
        batches = iter(batches)
        first = next(batches)
        buffers = [[tensor.clone().share_memory_() for tensor in first] for _ in range(slots)]
        pipe.send(buffers)
        for number, batch in enumerate(itertools.chain([first], batches)):
            if number >= slots and pipe.recv() == _SHUTDOWN:
                return
            for buffer, tensor in zip(buffers[number % slots], batch):
                buffer[: len(tensor)].copy_(tensor)
            pipe.send((number % slots, len(batch[0])))
        pipe.send((0, 0))
        while pipe.recv() != _SHUTDOWN:
            pass
