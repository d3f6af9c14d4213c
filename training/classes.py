"""Which classes a model knows, by label: of its file, or of the data where the file does not name them."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import CheckpointError, DataError
from common.text import listed, printable
from data.base import ClassNames
from data.classes import in_timm_order, places
from data.sources import candidates
from recipe.config import Recipe
from training.weights import StoredWeights, is_classifier


class Known(NamedTuple):
    """Names of a model's classes by label. note: a line for the user on where they are from; empty: from its file."""

    names: Tuple[str, ...]
    note: str = ""


class Fitted(NamedTuple):
    """Tensors for a model of other data. fresh: names of those that start anew. note: a line for the user, or empty."""

    tensors: Dict[str, torch.Tensor]
    fresh: List[str]
    note: str


def of_model(stored: Any, recipe: Recipe) -> Known:
    """Return the classes that a model knows.

    Weights of other programs do not name them: those that are read are of timm's EfficientNets, so class folders are
    taken in timm's order. Files of our own that do not name them were trained on the data in its own order.

    Args:
        stored: StoredWeights or an ExportedModel, of as many classes as `recipe`.

    Raises CheckpointError: the file names another number of classes than it has. DataError: neither the file nor the
    data of the recipe names as many.
    """
    classes = recipe.model.classes
    named = _named(stored)
    if named is not None:
        if len(named) != classes:
            fault = f"names {len(named)} classes, but its model has {classes}"
            raise CheckpointError(f"{stored.path}: damaged: {fault}; export it again, or take another checkpoint")
        return Known(named)
    found = candidates(recipe.data, classes)
    fitting = [each for each in found if len(each.names) == classes]
    if not fitting:
        fault = f"{len(found[-1].names)} classes, but {stored.path} has {classes} and does not name them"
        remedy = "name them all (a class folder may be empty), or set data.train_folder to a folder that has them"
        raise DataError(f"{found[-1].place}: {fault}; {remedy}")
    return _of_data(stored, fitting[0])


def for_data(stored: StoredWeights, fitted: Fitted, recipe: Recipe, data: ClassNames) -> Fitted:
    """Return weights for a model of other data: the classifier's rows in the order of the data's classes.

    A classifier of other classes starts anew, even if they are as many.

    Args:
        fitted: the result of `weights.fitted`.
        data: the classes that the new model is trained on.

    Raises CheckpointError: a classifier of other classes, in a family of models whose classifier has no name.
    """
    if fitted.fresh:
        return fitted
    named = _named(stored)
    known = _of_data(stored, data) if named is None else Known(named)
    rows = places(data.names, known.names)
    classifier = [name for name in fitted.tensors if is_classifier(recipe.model, name)]
    tensors = dict(fitted.tensors)
    if len(known.names) == len(data.names) and (rows >= 0).all():
        if rows.tolist() == list(range(len(rows))):
            return fitted._replace(note=known.note)
        _check_named(stored, classifier, "in another order than those of the data")
        for name in classifier:
            tensors[name] = tensors[name][torch.from_numpy(rows)]
        note = (
            known.note or f"{stored.path}: has the classes of {data.place} in another order; its classifier is sorted"
        )
        return Fitted(tensors, [], printable(note))
    _check_named(stored, classifier, f"({listed(known.names)}) other than those of the data ({listed(data.names)})")
    for name in classifier:
        del tensors[name]
    note = f"{stored.path}: was trained on other classes ({listed(known.names)}), so the classifier starts anew"
    return Fitted(tensors, classifier, printable(note))


def _named(stored: Any) -> Optional[Tuple[str, ...]]:
    """Printable names in a file, as sources have them; None where it has none. Raises CheckpointError: no list."""
    if not stored.classes:
        return None
    if not isinstance(stored.classes, list):
        raise CheckpointError(f"{stored.path}: damaged: the names of its classes cannot be read")
    return tuple(printable(str(name)) for name in stored.classes)


def _of_data(stored: Any, data: ClassNames) -> Known:
    """The classes of a model whose file does not name them, by those of data that has as many."""
    names = data.names
    order = "in the order of the data's own labels"
    if data.sorted and stored.recipe is None:
        names = in_timm_order(names)
        order = "in timm's order (numbers by value, case ignored)"
    elif data.sorted:
        order = "in the order of their names as bytes"
    note = f"{stored.path}: does not name its classes; assumed: those of {data.place} {order}: {listed(names)}"
    return Known(names, printable(note))


def _check_named(stored: StoredWeights, classifier: Sequence[str], fault: str) -> None:
    if not classifier:
        remedy = "train from the beginning, or on the same classes"
        raise CheckpointError(f"{stored.path}: has classes {fault}, and a classifier that has no name; {remedy}")
