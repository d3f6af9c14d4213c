"""What a name stands for: the sizes of a model, and the keys of an optimizer or a schedule with their defaults.

A recipe that names `sgd` has SGD's keys and no others; a key of another optimizer is an error, not ignored.
"""

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

# LARS: the G16 recipe. RMSprop: Tan and Le. LAMB: You et al., 1904.00962. SGD: Goyal et al., 1706.02677.
OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "lars": {
        "momentum": 0.885,
        "weight_decay": 2.5e-6,
        "eps": 0.0,
        "trust_coefficient": 0.001,
        "trust": "gradient",
        "skip_lr_scale": 1.0,
    },
    "sgd": {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": False},
    "rmsprop": {"momentum": 0.9, "weight_decay": 1e-5, "eps": 1e-3, "alpha": 0.9},
    "lamb": {"weight_decay": 0.01, "eps": 1e-6, "beta1": 0.9, "beta2": 0.999},
}

SCHEDULES: Dict[str, Dict[str, Any]] = {
    "polynomial": {"power": 2.0, "final_ratio": 1e-5},
    "cosine": {"final_ratio": 0.0},
    "exponential": {"decay_rate": 0.97, "decay_epochs": 2.4},
    "constant": {},
}

# Sections whose name decides which of these keys they have.
FAMILIES = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}


def keys_of_family(section: str) -> set:
    """All keys of a section that only some of its names have; empty for other sections."""
    return {key for keys in FAMILIES.get(section, {}).values() for key in keys}


def fill(values: Any, table: Dict[str, Dict[str, Any]], default: str) -> Any:
    """`values` with the keys of the name in it (`default` if it gives none) where they are missing or null."""
    name = values.get("name", default) if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in table:
        return values
    return {**values, **{key: value for key, value in table[name].items() if values.get(key) is None}}


def refuse_foreign(section: Any, table: Dict[str, Dict[str, Any]]) -> None:
    """Raises ValueError for a key of `section` that belongs to other names than its own."""
    for name, keys in table.items():
        for key in keys:
            if key not in table[section.name] and getattr(section, key) is not None:
                own = ", ".join(table[section.name]) or "none of its own"
                raise ValueError(f"{key} belongs to {name}, not to {section.name} (its keys: {own}); remove {key}")
