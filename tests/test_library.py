"""docs/library.md's loop, as it is printed there, on two ranks."""

import re

import pytest

from tests import world
from tests.conftest import ROOT

LOOP = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL).group(1)


def trains(rank, size, sparse):
    """The losses of the page's loop."""
    names = {}
    exec(compile(LOOP, "docs/library.md", "exec"), names)
    return names["train"](6, sparse)


@pytest.mark.multiprocess
@pytest.mark.parametrize("sparse", [False, True])
def test_the_loop_of_the_page_learns_on_two_ranks(sparse):
    for losses in world.run(2, trains, sparse):
        assert len(losses) == 6 and losses[-1] < losses[0]
