"""Many names in little memory."""

from typing import Sequence

import numpy as np


class Names:
    """Names by number, held in one block of bytes.

    As strings, the 1.28 million paths of ImageNet would take twice as much, and each worker would come to own a copy,
    because to use a string is to write its reference count.
    """

    def __init__(self, blocks: Sequence[bytes], lengths: Sequence[np.ndarray]):
        """
        Args:
            blocks: names one after the other, without separators.
            lengths: integers [names], bytes of each name in a block.
        """
        self._block = b"".join(blocks)
        self._ends = np.cumsum(np.concatenate(lengths), dtype=np.uint64)

    def __getitem__(self, index: int) -> bytes:
        start = int(self._ends[index - 1]) if index else 0
        return self._block[start : int(self._ends[index])]
