"""Running processes, read from Linux's /proc."""

import contextlib
from pathlib import Path
from typing import Dict, List, Union


def children(parent: int) -> List[int]:
    """Child processes; none of a process that is gone."""
    with contextlib.suppress(OSError):
        return [int(text) for text in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def tree(root: int) -> List[int]:
    return [root, *(process for child in children(root) for process in tree(child))]


def runs(process: int) -> bool:
    """Whether it is there, and neither stopped nor dead."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "TtZX"
    return False


def kilobytes(process: Union[int, str], file: str) -> Dict[str, int]:
    """All amounts of memory in a process's `status` or `smaps_rollup`, by name. Raises OSError if it is gone."""
    lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    return {words[0].rstrip(":"): int(words[1]) for words in map(str.split, lines) if words[-1:] == ["kB"]}
