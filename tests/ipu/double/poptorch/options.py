"""A recorder of options: which methods were called with which arguments (PopTorch 3.4,
python/options.py)."""

import inspect

import torch
from signatures import SESSION_OPTIONS, poptorch


class Recorder:
    """An object with the methods and groups of a class of the table.

    Calls are checked against it and recorded.

    calls: (path of the method, its arguments) in order, e.g. ("Options.Training.gradientAccumulation", (8,)).
    frozen: set once a model or a loader has the options; a call is an AttributeError then.
    """

    def __init__(self, table, path, root=None):
        self.table = table
        self.path = path
        self.root = root or self
        if root is None:
            self.calls = []
            self.frozen = False

    def __getattr__(self, name):
        if name.startswith("__") or name in ("calls", "frozen", "table"):
            raise AttributeError(name)
        found = getattr(self.table, name)
        return (
            Recorder(found, f"{self.path}.{name}", self.root)
            if inspect.isclass(found)
            else self._recording(found)
        )

    def _recording(self, method):
        def call(*args, **kwargs):
            if self.root.frozen:
                raise AttributeError("Can't modify frozen Options")
            signature = inspect.signature(method)
            bound = signature.bind(self, *args, **kwargs).arguments
            for name, value in bound.items():
                expected = signature.parameters[name].annotation
                refused = f"Unexpected type {type(value)} for option {name}. Expected {expected}"
                assert expected is inspect.Parameter.empty or isinstance(value, expected), refused
            if method.__name__ == "numIOTiles":
                (tiles,) = args
                even = 32 <= tiles <= 192 and tiles % 2 == 0
                assert even, "numIOTiles must be an even number between 32 and 192."
            arguments = tuple(bound.values())[1:]
            if self.path.endswith("._Popart") and arguments[0] not in SESSION_OPTIONS:
                raise RuntimeError(f"Unknown session option {arguments[0]}")
            self.root.calls.append((f"{self.path}.{method.__name__}", arguments))
            return self

        return call


class TensorLocationSettings(Recorder):
    def __init__(self):
        super().__init__(poptorch.TensorLocationSettings, "TensorLocationSettings")


class Options(Recorder):
    def __init__(self):
        super().__init__(poptorch.Options, "Options")

    def randomSeed(self, random_seed):
        """Seeds the device's generator, and torch's as well."""
        recorded = self._recording(self.table.randomSeed)(random_seed)
        torch.manual_seed(random_seed)
        return recorded

    def value(self, method, default=None):
        """The argument of the last call of a method, e.g. "Training.gradientAccumulation"."""
        found = [arguments[0] for path, arguments in self.calls if path == f"Options.{method}"]
        return found[-1] if found else default

    @property
    def replicas(self):
        return self.value("replicationFactor", 1)

    @property
    def micro_batches(self):
        return (
            self.replicas
            * self.value("deviceIterations", 1)
            * self.value("Training.gradientAccumulation", 1)
        )
