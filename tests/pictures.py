"""Class folders of random images."""

import numpy as np
from PIL import Image


def write_pictures(root, classes=("a", "b"), size=12, **counts):
    """Write noise below root/SPLIT/CLASS, `counts` PNG files a class in each split; return
    `root`."""
    draws = np.random.default_rng(0)
    for split, count in counts.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root
