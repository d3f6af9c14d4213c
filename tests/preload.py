"""Imports of the fork server (tests/world.py). A rank reports itself what cannot be imported here."""

import contextlib

with contextlib.suppress(Exception):
    import engines.torch_engine  # noqa: F401
    import train  # noqa: F401
    import training.run  # noqa: F401
