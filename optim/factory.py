"""From the recipe's optimizer section to an optimizer with its parameter groups."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import types
from typing import Any, Dict, Iterable, List, Mapping, Set

from torch import nn

from optim import lars, library_optimizers  # noqa: F401  (register themselves)
from optim.base import OPTIMIZERS, HasSlots
from recipe.optimization import Optimizer

# Importing a module that is named like an optimizer registers it.
for _name in Optimizer.kinds:
    if importlib.util.find_spec(f"{__package__}.{_name}"):
        importlib.import_module(f"{__package__}.{_name}")

_NO_LAYERS: Mapping[str, int] = types.MappingProxyType({})
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
# Of torch's attention; the weight of its output is that of a Linear.
_OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# What torch.nn.utils.parametrizations stores in the place of a parameter.
_PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original\d*$")


def create(
    section: Optimizer,
    parameters: Dict[str, nn.Parameter],
    norm_parameters: Iterable[str],
    hidden: Mapping[str, int] = _NO_LAYERS,
    depths: Mapping[str, int] = _NO_LAYERS,
) -> HasSlots:
    """Create the optimizer of a section; its learning rate is set at each step.

    Skipped parameters have no weight decay; with LARS and LAMB no trust ratio either. The others
    have the ratio even where `weight_decay` is 0.

    Args:
        section: of the recipe.
        parameters: by name, float32.
        norm_parameters: result of `models.normalization.norm_parameters`.
        hidden: result of `hidden_layers` for the whole model; only Muon uses it.
        depths: how deep each parameter of the whole model lies, from 0; for `layer_decay`.

    Returns:
        A torch optimizer.
    """
    kind = OPTIMIZERS.of(section)
    skipped = skipped_names(section, parameters, norm_parameters)
    groups = kind.groups(section, parameters, skipped, hidden)
    # After the kind has made its groups: depth divides them, and keeps their options.
    if section.layer_decay is not None:
        groups = _by_depth(groups, parameters, depths, section.layer_decay)
    optimizer = kind.of(section, [group for group in groups if group["params"]])
    # The section's and not the class's: some slots are kept for some numbers only, as momentum is.
    optimizer.slots = section.slots
    return optimizer


def _by_depth(
    groups: Iterable[Dict[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    depths: Mapping[str, int],
    decay: float,
) -> List[Dict[str, Any]]:
    """Divide parameter groups by the learning rate that follows from the depth.

    The deepest parameters have the whole rate, those one layer before `decay` times as much.

    Source: Clark et al., ELECTRA, 2003.10555, table 6; `param_groups_layer_decay` of timm.

    Args:
        groups: of torch's optimizers; a `lr_scale` of theirs is kept as a factor.
        parameters: of these groups, by name.
        depths: of all parameters of the model.
        decay: of the rate from a layer to the one before.
    """
    # Of the whole model: a stage must not take its own deepest layer for the classifier.
    deepest = max(depths.values())
    scale_of = {id(each): decay ** (deepest - depths[name]) for name, each in parameters.items()}
    divided = []
    for group in groups:
        by_scale: Dict[float, List[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_scale.setdefault(scale_of[id(parameter)], []).append(parameter)
        for scale, members in by_scale.items():
            lr_scale = group.get("lr_scale", 1.0) * scale
            divided.append({**group, "params": members, "lr_scale": lr_scale})
    return divided


def skipped_names(
    section: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    norm_parameters: Iterable[str],
) -> Set[str]:
    """Return the parameters that `skip` names.

    Args:
        section: of the recipe. In its `skip`, "bias" covers all biases, "norm" the scales of norms.
        parameters: all, by name.
        norm_parameters: result of `models.normalization.norm_parameters`.
    """
    # A norm's bias counts as a bias, so "norm" leaves it alone.
    names = set(parameters)
    biases = {name for name, parameter in parameters.items() if _is_bias(name, parameter)}
    skipped: Set[str] = set()
    if "bias" in section.skip:
        skipped |= biases
    if "norm" in section.skip:
        skipped |= names.intersection(norm_parameters) - biases
    return skipped


def _is_bias(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of this name, as `q_bias`, is a bias."""
    last = name.split(".")[-1]
    # Biases by position, and not by channel, are tables.
    return last == "bias" or (last.endswith("_bias") and parameter.dim() <= 1)


def hidden_layers(model: nn.Module) -> Dict[str, int]:
    """Return the weights that are matrices between the first and the last layer.

    A layer is a linear one, a convolution or an embedding, parametrised (spectral norm, say) or
    not. They are taken in the order in which the model registers them. Embeddings are no matrices
    but tables, of which a row is looked up. Depthwise convolutions are left out: each of their
    groups has one row, so it is a vector.

    Args:
        model: the whole model, not a stage of it.

    Returns:
        By name, into how many matrices of consecutive rows a weight is divided: the groups of a
        convolution, else 1.
    """
    # Other parameters of several dimensions are tokens, positions and tables of biases in timm's
    # models. In a module of a user's own they may be matrices, too (nn.LSTM, nn.Bilinear), but what
    # is done with them is not known.
    layers: Dict[str, nn.Module] = {}
    stored: Dict[str, Dict[str, nn.Parameter]] = {}  # of each layer's weight, by name
    for name, parameter in model.named_parameters():
        weight = _PARAMETRIZED.sub(r"\1", name)
        prefix, _, last = weight.rpartition(".")
        module = model.get_submodule(prefix)
        if _is_matrix(module, last) or isinstance(module, nn.Embedding):
            layers[weight] = module
            stored.setdefault(weight, {})[name] = parameter
    hidden = {}
    # Without the first and the last one, which Muon's author steps by AdamW, too.
    for weight in list(layers)[1:-1]:
        module = layers[weight]
        if isinstance(module, nn.Embedding):
            continue
        groups = module.groups if isinstance(module, _CONVOLUTIONS) else 1
        for name, parameter in stored[weight].items():
            # A user's parametrisation may store anything.
            if parameter.dim() < 2 or len(parameter) % groups:
                continue
            rows = len(parameter) // groups
            columns = math.prod(parameter.shape[1:])
            if min(rows, columns) > 1:
                hidden[name] = groups
    return hidden


def _is_matrix(module: nn.Module, name: str) -> bool:
    """Return whether a layer multiplies what it is given by its parameter of this name."""
    if isinstance(module, nn.MultiheadAttention):
        return name in _OF_ATTENTION
    return isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and name == "weight"
