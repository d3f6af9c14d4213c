"""poptorch.DataLoader and AsynchronousDataAccessor (PopTorch 3.4, python/__init__.py).

Their checks and their batches are PopTorch's; so are the accessor's process and its buffers (python/_dataloader.py).
"""

import atexit
import contextlib
import faulthandler
import itertools
import signal

import torch
from torch import multiprocessing

from .enums import DataLoaderMode, SharingStrategy
from .errors import logger, python_error
from .options import Options
from .tracing import like, tensors_in


class _Part:
    """The consecutive part of a data set that belongs to one process; reshuffled as a whole at every pass."""

    def __init__(self, dataset, options, step, drop_last):
        count, processes, process = len(dataset), options.Distributed.numProcesses, options.Distributed.processId
        if drop_last:
            self._length = step * (count // (step * processes))
            self._offset = process * self._length
        else:
            lengths = [count // processes + (count % processes > other) for other in range(processes)]
            self._length, self._offset = lengths[process], sum(lengths[:process])
        self._dataset = dataset
        self._order = None
        self._generator = torch.Generator()
        if options.exists("random_seed"):
            self._generator.manual_seed(options.random_seed)

    def shuffle(self):
        """A new order of the whole data set, the same in all processes."""
        self._order = torch.randperm(len(self._dataset), generator=self._generator)

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        index += self._offset
        return self._dataset[index if self._order is None else int(self._order[index])]


def _combined(batches, count, drop_last):
    """Concatenates `count` successive batches at a time."""
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) == count:
            yield _concatenate(waiting)
            waiting = []
    if waiting and not drop_last:
        yield _concatenate(waiting)


def _concatenate(batches):
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {key: _concatenate([batch[key] for batch in batches]) for key in first}
    return type(first)(_concatenate(list(parts)) for parts in zip(*batches))


class DataLoader(torch.utils.data.DataLoader):
    """torch's loader with batches for a whole call: batch_size * deviceIterations * replicas * accumulation."""

    def __init__(
        self,
        options,
        dataset,
        batch_size=1,
        shuffle=None,
        num_workers=0,
        drop_last=True,
        persistent_workers=None,
        auto_distributed_partitioning=True,
        mode=DataLoaderMode.Sync,
        async_options=None,
        rebatched_worker_size=None,
        batch_sampler=None,
        **kwargs,
    ):
        self._accessor = None
        self._by_sampler = batch_sampler is not None
        self._drop_last = drop_last
        self._shuffled_part = False
        if self._by_sampler:
            self._check_sampler(options, batch_size, shuffle, auto_distributed_partitioning)
            batch_size = getattr(batch_sampler, "batch_size", batch_size)
        assert isinstance(options, Options)
        options._freeze()
        self._options = options
        self._count = options.device_iterations * options.replication_factor * options.Training.gradient_accumulation
        self._combined_batch_size = None if batch_size is None else batch_size * self._count
        shuffle = bool(shuffle)
        if isinstance(dataset, torch.utils.data.IterableDataset):
            assert not auto_distributed_partitioning or options.Distributed.numProcesses == 1, (
                "auto_distributed_partitioning not supported for IterableDataset"
            )
        else:
            self._warn_of_remainder(len(dataset))
            if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
                dataset, shuffle = self._part(dataset, shuffle)
        self._rebatched = mode == DataLoaderMode.AsyncRebatched or (
            mode == DataLoaderMode.Async and not drop_last and (self._combined_batch_size or 1) > 1
        )
        if self._rebatched and rebatched_worker_size is not None:
            assert rebatched_worker_size <= self._combined_batch_size, (
                f"The rebatched_worker_size ({rebatched_worker_size}) must be <= to the combined batch size "
                f"({self._combined_batch_size})"
            )
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        if self._by_sampler:
            kwargs["batch_sampler"] = batch_sampler
        else:
            kwargs.update(batch_size=self._combined_batch_size, shuffle=None if _iterable(dataset) else shuffle)
            kwargs["drop_last"] = drop_last and self._combined_batch_size is not None
        super().__init__(dataset, num_workers=num_workers, persistent_workers=persistent_workers, **kwargs)
        if mode != DataLoaderMode.Sync:
            self._accessor = self._new_accessor(async_options or {})

    @staticmethod
    def _check_sampler(options, batch_size, shuffle, auto_distributed_partitioning):
        if batch_size != 1 or shuffle:
            raise python_error("`batch_sampler` option is mutually exclusive with batch_size, shuffle.")
        if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
            raise python_error("`batch_sampler` option is mutually exclusive with auto_distributed_partitioning=True.")

    def _warn_of_remainder(self, count):
        if self._drop_last or self._by_sampler or self._combined_batch_size is None:
            return
        size = self._combined_batch_size * self._options.Distributed.numProcesses
        if count % size:
            logger.warning(
                "The number of elements in the dataset (%d) is not divisible by the number of elements processed per "
                "step (%d) and drop_last=False. The last tensor will have a batch size of %d. To avoid having to "
                "handle this special case switch to drop_last=True",
                count,
                size,
                count % size,
            )

    def _part(self, dataset, shuffle):
        assert not shuffle or self._options.exists("random_seed"), (
            "When using auto_distributed_partitioning you must set poptorch.Options.randomSeed() to ensure that "
            "tensors are in the same order in all processes."
        )
        assert self._combined_batch_size is not None, (
            "batch_size=None not allowed when using auto_distributed_partitioning."
        )
        self._shuffled_part = shuffle
        return _Part(dataset, self._options, self._combined_batch_size, self._drop_last), False

    def _new_accessor(self, async_options):
        assert "rebatched_size" not in async_options, (
            "You cannot use DataLoaderMode.AsyncRebatched and manually specify the rebatched_size in async_options"
        )
        size = self._combined_batch_size if self._rebatched else None
        return AsynchronousDataAccessor(self, **async_options, rebatched_size=size)

    @property
    def combinedBatchSize(self):
        """Items of one call on this process."""
        return self._combined_batch_size

    @property
    def options(self):
        """The options, frozen."""
        return self._options

    def terminate(self):
        """Ends the loading process, if there is one."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __iter__(self):
        if self._accessor is not None:
            return iter(self._accessor)
        return self._batches()

    def _batches(self):
        if self._shuffled_part:
            self.dataset.shuffle()
        batches = super().__iter__()
        if self._by_sampler and self._count != 1:
            return _combined(batches, self._count, self._drop_last)
        return batches


def _iterable(dataset):
    return isinstance(dataset, torch.utils.data.IterableDataset)


class AsynchronousDataAccessor:
    """Iterates once over a loader (or any iterable of tensors) that a process of its own reads.

    What it gives lies in that process's `buffer_size` buffers, and is overwritten some batches later.
    """

    def __init__(
        self,
        dataset,
        buffer_size=3,
        miss_sleep_time_in_ms=0.1,
        load_indefinitely=True,
        early_preload=False,
        sharing_strategy=SharingStrategy.ForkServer,
        rebatched_size=None,
    ):
        self._process = None
        if isinstance(dataset, DataLoader) and dataset._accessor is not None:
            raise python_error(
                "The DataLoader already uses an AsynchronousDataAccessor internally. Either use the existing one or "
                "set mode='poptorch.DataLoaderMode.Sync' in the DataLoader."
            )
        assert rebatched_size is None or rebatched_size > 1, "rebatched_size must be None or greater than 1"
        self._dataset, self.rebatched_size = dataset, rebatched_size
        context = multiprocessing.get_context("forkserver")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_fill, args=(far_end, dataset, buffer_size))
        self._process.start()
        far_end.close()
        atexit.register(self.terminate)
        self._taken, self._buffers = 0, self._pipe.recv()

    def terminate(self):
        """Ends the process, by force where it does not answer. The real one waits for 20 seconds before."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(timeout=5)
            self._process.terminate()
            self._process.join()
            self._process = None

    def __len__(self):
        return len(self._dataset)

    def __iter__(self):
        assert self._process is not None and self._taken == 0
        return self

    def __next__(self):
        assert self._process is not None
        try:
            if self._taken:
                self._pipe.send("the last one may be overwritten")
            slot, rows = self._pipe.recv()
        except (EOFError, ConnectionError):  # a process that ended without an error is waited for, as by the real one
            while True:
                self._process.join(timeout=0.1)
                assert self._process.exitcode in (None, 0), "An error occurred in the data fetcher"
        if not rows:
            raise StopIteration
        self._taken += 1
        buffer = self._buffers[slot]
        return like(buffer, iter([tensor[:rows] for tensor in tensors_in(buffer)]))


def _fill(pipe, dataset, slots):
    """The accessor's process: fills its buffers in turn, and again once they are free. SIGINT is no error."""
    faulthandler.register(signal.SIGTERM, chain=True)
    with contextlib.suppress(KeyboardInterrupt, EOFError, ConnectionError):
        batches = iter(dataset._batches() if isinstance(dataset, DataLoader) else dataset)
        first = next(batches)
        copies = [[tensor.clone().share_memory_() for tensor in tensors_in(first)] for _ in range(slots)]
        pipe.send([like(first, iter(copy)) for copy in copies])
        for number, batch in enumerate(itertools.chain([first], batches)):
            if number >= slots:
                pipe.recv()
            for target, tensor in zip(copies[number % slots], tensors_in(batch)):
                rows = len(tensor)
                target[:rows].copy_(tensor)
            pipe.send((number % slots, rows))
        pipe.send((0, 0))
        while True:
            pipe.recv()
