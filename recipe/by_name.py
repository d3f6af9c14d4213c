"""What the name of a model stands for: its sizes."""

from typing import Any, Dict

# Compound scaling: Tan and Le, 1905.11946; the figures are those of the authors' published code.
COMPOUND_SCALES: Dict[str, Dict[str, Any]] = {
    "efficientnet_b0": {"width": 1.0, "depth": 1.0, "image_size": 224, "dropout": 0.2},
    "efficientnet_b1": {"width": 1.0, "depth": 1.1, "image_size": 240, "dropout": 0.2},
    "efficientnet_b2": {"width": 1.1, "depth": 1.2, "image_size": 260, "dropout": 0.3},
    "efficientnet_b3": {"width": 1.2, "depth": 1.4, "image_size": 300, "dropout": 0.3},
    "efficientnet_b4": {"width": 1.4, "depth": 1.8, "image_size": 380, "dropout": 0.4},
    "efficientnet_b5": {"width": 1.6, "depth": 2.2, "image_size": 456, "dropout": 0.4},
    "efficientnet_b6": {"width": 1.8, "depth": 2.6, "image_size": 528, "dropout": 0.5},
    "efficientnet_b7": {"width": 2.0, "depth": 3.1, "image_size": 600, "dropout": 0.5},
}


def fill(values: Any, table: Dict[str, Dict[str, Any]], default: str) -> Any:
    """`values` with the keys of the name in it (`default` if it gives none) where they are missing or null."""
    name = values.get("name", default) if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in table:
        return values
    return {**values, **{key: value for key, value in table[name].items() if values.get(key) is None}}
