"""Groups of processes, and messages that are on their way in one, with types that are certain.

torch.distributed returns something else where a process is not in the group that it names: ours
always are.
"""

from __future__ import annotations

from datetime import timedelta
from typing import List, Optional

import torch.distributed as dist

# None: as a function's argument all processes; as its result no others. Quoted, as a torch without
# distributed processes has no such class, and trains in a single one.
Group = Optional["dist.ProcessGroup"]


def begun(work: Optional[dist.Work]) -> dist.Work:
    """Return a message that is on its way, here `work`, to be waited for."""
    assert work is not None, "this process is not in the group"
    return work


def new_group(
    *,
    timeout: Optional[timedelta] = None,
    ranks: Optional[List[int]] = None,
    backend: Optional[str] = None,
) -> dist.ProcessGroup:
    """Create a group that nothing else uses.

    Args:
        timeout: of its messages; None: torch's default.
        ranks: with this one, which alone have to call; None: all, which all call.
        backend: "gloo" or "nccl"; None: one for each type of device.
    """
    if ranks is None:
        group = dist.new_group(timeout=timeout, backend=backend)
    else:
        group = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            # Else processes of other groups would have to call, too.
            use_local_synchronization=True,
        )
    assert group is not None and not isinstance(group, int), "this process is not in the group"
    return group
