"""Classes that a model knows, by label: from its file, or from the data where the file has none."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import CheckpointError, DataError
from common.text import listed, printable
from data.base import ClassNames
from data.classes import in_timm_order, places
from data.sources import candidates
from models.families import is_classifier
from recipe.config import Data, Model
from training.weights import TIMM_ORDER, StoredWeights, class_order


class Known(NamedTuple):
    """Classes that a model knows.

    names: by label.
    note: line for the user that says where they are from; empty: from its file.
    """

    names: Tuple[str, ...]
    note: str = ""


class Fitted(NamedTuple):
    """Weights for a model of other data.

    tensors: by name.
    fresh: names of those that are left out, to start anew.
    note: line for the user, or empty.
    """

    tensors: Dict[str, torch.Tensor]
    fresh: List[str]
    note: str


def of_model(stored: Any, data: Data, classes: int) -> Known:
    """Return the classes that a model knows.

    Weights of other programs do not name them: those that are read are of timm's EfficientNets, so
    class folders are taken in timm's order. Files of our own that do not name them were trained on
    the data in its own order.

    Args:
        stored: `StoredWeights` or an `ExportedModel`.
        data: whose classes the model knows if its file does not name any.
        classes: of the model.

    Raises:
        CheckpointError: the file names another number of classes than it has.
        DataError: neither the file nor the data names as many.
    """
    names = _named(stored)
    if names is not None and len(names) != classes:
        fault = f"damaged: names {len(names)} classes, but its model has {classes}"
        remedy = "export it again, or take another checkpoint"
        raise CheckpointError(f"{stored.path}: {fault}; {remedy}")
    if names is not None:
        return Known(names)
    # The validation images may lack classes, and the training images may be elsewhere: the first
    # that has as many as the model is taken, and the user is told which.
    splits = candidates(data, classes)
    for split in splits:
        if len(split.names) == classes:
            return _of_data(stored, split)
    last = splits[-1]
    fault = f"{len(last.names)} classes, but {stored.path} has {classes} and does not name them"
    remedy = "name them all (a class folder may be empty)"
    other_remedy = "set data.train_folder to a folder that has them"
    raise DataError(f"{last.place}: {fault}; {remedy}, or {other_remedy}")


def for_data(stored: StoredWeights, fitted: Fitted, model: Model, data: ClassNames) -> Fitted:
    """Return weights whose classifier has its rows in the order of the data's classes.

    A classifier of other classes starts anew, even if they are as many.

    Args:
        stored: the file's weights.
        fitted: the same under the names of the model, from `weights.fitted`.
        model: section of the new model.
        data: the classes that the new model is trained on.

    Raises:
        CheckpointError: a classifier of other classes, in a family of models whose classifier has
            no name.
    """
    # It has another number of rows than the data has classes, and starts anew already.
    if fitted.fresh:
        return fitted
    names = _named(stored)
    known = _of_data(stored, data) if names is None else Known(names)
    rows = places(data.names, known.names)
    if rows.tolist() == list(range(len(known.names))):
        return fitted._replace(note=known.note)
    # Its rows change, or it starts anew.
    tensors = dict(fitted.tensors)
    classifier = [name for name in tensors if is_classifier(model, name)]
    if len(known.names) == len(data.names) and (rows >= 0).all():
        _check_has_classifier(stored, classifier, "in another order than those of the data")
        for name in classifier:
            tensors[name] = tensors[name][torch.from_numpy(rows)]
        order = f"has the classes of {data.place} in another order; its classifier is sorted"
        return Fitted(tensors, [], printable(known.note or f"{stored.path}: {order}"))
    shown = listed(known.names)
    fault = f"({shown}) other than those of the data ({listed(data.names)})"
    _check_has_classifier(stored, classifier, fault)
    for name in classifier:
        del tensors[name]
    note = f"was trained on other classes ({shown}), so the classifier starts anew"
    return Fitted(tensors, classifier, printable(f"{stored.path}: {note}"))


def _named(stored: Any) -> Optional[Tuple[str, ...]]:
    """Return the printable names in a file, as sources have them; None where it has none.

    Raises CheckpointError where they are no list.
    """
    # Names that were made printable in the data would not match raw ones in the file.
    if not stored.classes:
        return None
    if not isinstance(stored.classes, list):
        fault = "damaged: the names of its classes cannot be read"
        raise CheckpointError(f"{stored.path}: {fault}")
    return tuple(printable(str(name)) for name in stored.classes)


def _of_data(stored: Any, data: ClassNames) -> Known:
    """Return the data's classes for a model that has as many, and whose file names none."""
    # Which order is assumed decides whether scores mean anything: the user is told.
    names = data.names
    if not data.sorted:
        order = "in the order of the data's own labels"
    elif class_order(stored) == TIMM_ORDER:
        names = in_timm_order(names)
        order = "in timm's order (numbers by value, case ignored)"
    else:
        order = "in the order of their names as bytes"
    assumed = f"assumed: those of {data.place} {order}: {listed(names)}"
    return Known(names, printable(f"{stored.path}: does not name its classes; {assumed}"))


def _check_has_classifier(stored: StoredWeights, classifier: Sequence[str], fault: str) -> None:
    """Raise CheckpointError where no tensor of the model is known to be of its classifier."""
    if not classifier:
        named = f"has classes {fault}, and a classifier that has no name"
        remedy = "train from the beginning, or on the same classes"
        raise CheckpointError(f"{stored.path}: {named}; {remedy}")
