"""A store as torch.distributed's, in this process."""

import threading


class Shared:
    """A store in this process, which threads share; a thread in `broken` is cut off from it."""

    def __init__(self):
        self.values = {}
        self.lock = threading.Lock()
        self.broken = set()

    def _reached(self):
        if threading.current_thread() in self.broken:
            raise RuntimeError("no way to the store")
        return self.lock

    def append(self, key, value):
        with self._reached():
            self.values[key] = self.values.get(key, b"") + value.encode()

    def add(self, key, amount):
        with self._reached():
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys):
        with self._reached():
            return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        with self._reached():
            if self.values.get(key, b"").decode() == expected:
                self.values[key] = desired.encode()
            return self.values[key]

    def get(self, key):
        with self._reached():
            return self.values[key]

    def set(self, key, value):
        with self._reached():
            self.values[key] = value.encode()
