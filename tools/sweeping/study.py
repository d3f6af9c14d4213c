"""The study of a sweep, an ordinary one of Optuna in an SQLite file.

Optuna is slow to load: import this late.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import optuna
from optuna import distributions as spaces
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from common.errors import ConfigError, first_line
from recipe.randomness import MASK32, key
from tools.sweeping.candidates import Parameters, grid
from tools.sweeping.definition import Axis, Definition, SweepFile, Value
from tools.sweeping.trials import COMPLETE, FAILED, IMPOSSIBLE, PRUNED, RUNNING, STATES, Record

# Impossible combinations are pruned trials to Optuna: so the sampler learns to avoid them.
_TO_OPTUNA = {
    COMPLETE: TrialState.COMPLETE,
    PRUNED: TrialState.PRUNED,
    IMPOSSIBLE: TrialState.PRUNED,
    FAILED: TrialState.FAIL,
}
# Trials that were ended by hand.
_FROM_OPTUNA = {
    TrialState.COMPLETE: COMPLETE,
    TrialState.PRUNED: PRUNED,
    TrialState.FAIL: FAILED,
}
_SAMPLERS = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
_DIGITS = 6  # of a drawn number, so that recipes stay readable
_STEP_DIGITS = 12  # of a number on a grid of steps: 0.3, not 0.30000000000000004
_MAX_DRAWS = 20  # until one is new
# Trials that PED-ANOVA should have among the best (its documentation), of at least twice as many.
_TARGET = 5
StorageError = (SQLAlchemyError, optuna.exceptions.StorageInternalError)


class Study:
    """The study in a file, which is opened or made."""

    def __init__(self, path: Path, sweep: SweepFile):
        """
        Args:
            path: of the SQLite file.
            sweep: whose trials are in it.

        Raises:
            ConfigError: the file is no study, or not that of this sweep.
            StorageError: of the disk.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._definition = sweep.definition
        self._distributions = {}
        for name, axis in sweep.definition.space.items():
            self._distributions[name] = _distribution(axis)
        try:
            self._storage = _storage(path)
            self._study = self._open(sweep.name)
            self._check()
        # Of the disk, not of what is on it.
        except (OperationalError, optuna.exceptions.StorageInternalError):
            raise
        except Exception as error:  # nearly everything is raised about a file changed by hand
            reason = first_line(getattr(error, "orig", None) or error)
            raise ConfigError(
                f"{path}: no study of this sweep ({reason}); remove it, or choose another folder by --output FOLDER"
            ) from None

    def _open(self, name: str) -> optuna.Study:
        """Return the study in the storage, or a new one called `name`."""
        # A sweep file that was renamed since goes on with its study.
        names = optuna.get_all_study_names(self._storage)
        return optuna.create_study(
            study_name=names[0] if names else name,
            storage=self._storage,
            direction=self._definition.direction,
            sampler=optuna.samplers.RandomSampler(),  # never used: see `_draw`
            pruner=_pruner(self._definition),
            load_if_exists=True,
        )

    def close(self) -> None:
        """Close the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def records(self) -> List[Record]:
        """Return all trials by number."""
        return [self._record(trial) for trial in self._trials()]

    def cut_off(self) -> List[int]:
        """Return the numbers of the trials that an earlier process has begun and not ended."""
        return [trial.number for trial in self._trials() if trial.state == TrialState.RUNNING]

    def begin(self) -> int:
        """Add the next trial, with all its parameters in one transaction; return its number."""
        drawn = self._draw()
        trial = create_trial(
            state=TrialState.RUNNING,
            params={name: _stored(value) for name, value in drawn.items()},
            distributions=self._distributions,
        )
        self._study.add_trial(trial)
        return self._trials()[-1].number

    def newest(self, number: int) -> int:
        """Return the newest evaluation that a trial has reported; 0 if there is none."""
        return self._trials()[number].last_step or 0

    def report(self, number: int, evaluation: int, value: float) -> bool:
        """Store the metric of a running trial at an evaluation.

        Args:
            number: of the trial.
            evaluation: its number, from 0; none before the newest one, by which Optuna decides.
            value: of the metric.

        Returns:
            Whether to prune the trial.
        """
        trial = self._running(number)
        # A sweep that was cut off reports the newest evaluation of its trials once more.
        if evaluation not in self._trials()[number].intermediate_values:
            trial.report(value, evaluation)
        return trial.should_prune()

    def end(
        self,
        number: int,
        state: str,
        value: Optional[float] = None,
        epochs: Optional[float] = None,
        seconds: Optional[float] = None,
        reason: Optional[str] = None,
    ) -> Record:
        """End a running trial.

        Args:
            number: of the trial.
            state: one of STATES, but RUNNING.
            value: of the metric; for complete ones only.
            epochs: that it was trained.
            seconds: of training.
            reason: why it is not complete.
        """
        trial = self._running(number)
        outcome = {"state": state, "epochs": epochs, "seconds": seconds, "reason": reason}
        trial.set_user_attr("outcome", outcome)  # one write: each waits for the disk
        # After the outcome: a trial that is cut off between the two runs again.
        self._study.tell(trial, value, state=_TO_OPTUNA[state])
        return self.records()[number]

    def importances(self) -> Optional[Dict[str, float]]:
        """Return the importance of each parameter, in all 1; None with too few trials.

        By PED-ANOVA (Watanabe, Bansal and Hutter, 2304.10255). Optuna's other evaluators need
        scikit-learn.
        """
        values = []
        for trial in self._trials():
            if trial.state == TrialState.COMPLETE and trial.value is not None:
                values.append(trial.value)
        # Among equal values none is the best.
        if len(values) < 2 * _TARGET or min(values) == max(values):
            return None
        # The best tenth of the trials, if that is enough of them, is compared with all.
        evaluator = PedAnovaImportanceEvaluator(target_quantile=max(0.1, _TARGET / len(values)))
        names = list(self._distributions)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ties
            shares = get_param_importances(self._study, evaluator=evaluator, params=names)
        if not math.isfinite(sum(shares.values())):
            return None
        return {name: float(share) for name, share in shares.items()}

    def _check(self) -> None:
        """Raise errors of many kinds for trials that no sweep of this definition has."""
        directions = [direction.name.lower() for direction in self._study.directions]
        if directions != [self._definition.direction]:
            raise ValueError("it has another direction")
        self._check_numbers()
        trials = self._trials()
        # A study in memory validates each.
        optuna.create_study(direction=self._definition.direction).add_trials(trials)
        for trial in trials:
            for name, distribution in trial.distributions.items():
                spaces.check_distribution_compatibility(distribution, self._distributions[name])
        for number, trial in enumerate(trials):
            if not self._is_whole(self._record(trial), number):
                raise ValueError(f"trial {number} is not what a sweep wrote")

    def _check_numbers(self) -> None:
        """Check the numbers of the trials in the file.

        Optuna passes over all but one of the trials with the same number.
        """
        query = "SELECT number FROM trials WHERE study_id = ? ORDER BY number"
        with self._storage.engine.connect() as connection:
            # SQLite does not enforce foreign keys.
            if connection.exec_driver_sql("PRAGMA foreign_key_check").first():
                raise ValueError("it has values of trials that are not there")
            rows = connection.exec_driver_sql(query, (self._study._study_id,))
            numbers = rows.scalars().all()
            if numbers != list(range(len(numbers))):
                raise ValueError("its trials are not numbered 0, 1, 2 and so on")

    def _is_whole(self, record: Record, number: int) -> bool:
        """Return whether a record is one that a sweep writes of its trial `number`."""
        if record.trial != number or record.state not in STATES:
            return False
        if set(record.parameters) != set(self._distributions):
            return False
        for value in (record.value, record.epochs, record.seconds):
            if value is not None and not _is_finite_number(value):
                return False
        # Reports and pictures rely on it: a complete trial is ranked by its value.
        if record.state == COMPLETE and record.value is None:
            return False
        return record.reason is None or isinstance(record.reason, str)

    def _trials(self) -> List[FrozenTrial]:
        """Return all trials as Optuna has them."""
        return self._study.get_trials(deepcopy=False)

    def _running(self, number: int) -> Trial:
        """Return a trial to be written to."""
        return Trial(self._study, self._trials()[number]._trial_id)

    def _record(self, trial: FrozenTrial) -> Record:
        """Return a trial as the sweep has it."""
        # A trial that was cut off between its outcome and its state runs again.
        outcome = {}
        if trial.state.is_finished():
            outcome = trial.user_attrs.get("outcome", {})
        last = trial.last_step
        if trial.state == TrialState.COMPLETE:
            value = trial.value
        elif last is None:
            value = None
        else:
            value = trial.intermediate_values[last]
        # A file changed by hand may lack some: `_is_whole` refuses it.
        parameters = {}
        for name in self._distributions:
            if name in trial.params:
                parameters[name] = self._original(name, trial.params[name])
        return Record(
            trial=trial.number,
            state=outcome.get("state", _FROM_OPTUNA.get(trial.state, RUNNING)),
            value=value,
            parameters=parameters,
            epochs=outcome.get("epochs"),
            seconds=outcome.get("seconds"),
            reason=outcome.get("reason"),
        )

    def _draw(self) -> Parameters:
        """Draw the next trial's parameters: a function of the seed and of the trials before it."""
        trials = self._trials()
        before = [self._record(trial).parameters for trial in trials]
        if self._definition.sampler == "grid":
            return grid(self._definition)[len(trials)]
        for attempt in range(_MAX_DRAWS):
            parameters = self._sample(trials, attempt)
            if parameters not in before:
                return parameters
        if self._definition.combinations() is None:
            return parameters
        # The space is all but used up: take a combination that is left.
        left = (parameters for parameters in grid(self._definition) if parameters not in before)
        return next(left)

    def _sample(self, trials: Sequence[FrozenTrial], attempt: int) -> Parameters:
        """Let Optuna draw parameters, with another seed for each attempt."""
        seed = key("sweep", self._definition.seed, len(trials), attempt) & MASK32
        sampler = _SAMPLERS[self._definition.sampler](seed=seed)
        # In memory: parameters drawn one by one in the file could be cut off half-way.
        study = optuna.create_study(direction=self._definition.direction, sampler=sampler)
        study.add_trials(trials)
        drawn = study.ask(self._distributions).params
        return {name: self._rounded(name, value) for name, value in drawn.items()}

    def _rounded(self, name: str, value: Any) -> Value:
        """Return a drawn value with the digits that a recipe gets."""
        axis = self._definition.space[name]
        if axis.choices is not None:
            return self._original(name, value)
        if axis.integer:
            return value
        digits = _DIGITS if axis.step is None else _STEP_DIGITS
        # Rounding may lead out of the range.
        low, high = axis.bounds
        return min(max(float(f"{value:.{digits}g}"), low), high)

    def _original(self, name: str, value: Any) -> Value:
        """Return a value as the sweep file has it: the study stores lists as text."""
        for choice in self._definition.space[name].choices or ():
            if isinstance(choice, list) and _stored(choice) == value:
                return choice
        return value


def _storage(path: Path) -> optuna.storages.RDBStorage:
    """Return Optuna's storage in an SQLite file."""
    # By SQLAlchemy, because a path may hold characters that mean something in a URL.
    url = URL.create("sqlite", database=str(path)).render_as_string()
    # Seconds to wait for a lock, which people who look into the file may hold.
    connection = {"connect_args": {"timeout": 60}}
    return optuna.storages.RDBStorage(url, engine_kwargs=connection)


def _pruner(definition: Definition) -> optuna.pruners.BasePruner:
    """Return what decides which trials are ended early."""
    if definition.pruner == "none":
        return optuna.pruners.NopPruner()
    return optuna.pruners.MedianPruner(definition.pruner_startup_trials, definition.pruner_warmup)


def _distribution(axis: Axis) -> BaseDistribution:
    """Return an axis as Optuna has it."""
    if axis.choices is not None:
        return CategoricalDistribution([_stored(choice) for choice in axis.choices])
    low, high = axis.bounds
    if axis.integer:
        step = int(axis.step or 1)
        return IntDistribution(int(low), int(high), log=axis.log, step=step)
    return FloatDistribution(low, high, log=axis.log, step=axis.step)


def _stored(value: Value) -> Any:
    """Return a value as the study stores it: lists as text."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _is_finite_number(value: Any) -> bool:
    """Return whether a value of the file is a number; true and false are none."""
    return type(value) in (int, float) and math.isfinite(value)
