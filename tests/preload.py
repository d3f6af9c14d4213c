"""What the fork server of tests/ranks.py imports, so that a rank starts in no time; ranks report what fails here."""

import contextlib

with contextlib.suppress(Exception):
    import engines.torch_engine  # noqa: F401
    import train  # noqa: F401
    import training.run  # noqa: F401
