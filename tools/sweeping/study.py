"""The study of a sweep, an ordinary one of Optuna in an SQLite file. Optuna is slow to load: import this late."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional

import optuna
from optuna import distributions as spaces
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from common.errors import ConfigError, first_line
from recipe.randomness import MASK32, key
from tools.sweeping.candidates import Parameters, grid
from tools.sweeping.definition import Axis, SweepFile, Value
from tools.sweeping.trials import COMPLETE, FAILED, IMPOSSIBLE, PRUNED, RUNNING, STATES, Record

# Impossible combinations are pruned trials to Optuna: so the sampler learns to avoid them.
_TO_OPTUNA = {
    COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED, IMPOSSIBLE: TrialState.PRUNED, FAILED: TrialState.FAIL,
}  # fmt: skip
_FROM_OPTUNA = {TrialState.COMPLETE: COMPLETE, TrialState.PRUNED: PRUNED, TrialState.FAIL: FAILED}  # ended by hand
_DIGITS = 6  # of a drawn number, so that recipes stay readable
_MAX_DRAWS = 20  # until one is new
_TARGET = 5  # trials that PED-ANOVA should have among the best (its documentation), of at least twice as many
StorageError = (SQLAlchemyError, optuna.exceptions.StorageInternalError)


class Study:
    """The study in a file, which is opened or made."""

    def __init__(self, path: Path, sweep: SweepFile):
        """Raises ConfigError if the file is no study, or not that of this sweep."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        definition = self._definition = sweep.definition
        self._distributions = {key: _distribution(axis) for key, axis in definition.space.items()}
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if definition.pruner == "median":
            pruner = optuna.pruners.MedianPruner(definition.pruner_startup_trials, definition.pruner_warmup)
        url = URL.create("sqlite", database=str(path)).render_as_string()
        try:
            self._storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
            names = optuna.get_all_study_names(self._storage)
            self._study = optuna.create_study(
                study_name=names[0] if names else sweep.name,
                storage=self._storage,
                direction=definition.direction,
                sampler=optuna.samplers.RandomSampler(),  # never used: see `_draw`
                pruner=pruner,
                load_if_exists=True,
            )
            self._check()
        except (OperationalError, optuna.exceptions.StorageInternalError):  # of the disk, not of what is on it
            raise
        except Exception as error:  # nearly everything is raised about a file that was changed by hand
            reason = first_line(getattr(error, "orig", None) or error)
            raise ConfigError(
                f"{path}: no study of this sweep ({reason}); remove it, or choose another folder by --output FOLDER"
            ) from None

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def records(self) -> List[Record]:
        """All trials by number."""
        return [self._record(each) for each in self._trials()]

    def cut_off(self) -> List[int]:
        """Numbers of the trials that an earlier process has begun and not ended."""
        return [each.number for each in self._trials() if each.state == TrialState.RUNNING]

    def begin(self) -> int:
        """Adds the next trial, with all its parameters in one transaction; returns its number."""
        drawn = self._draw()
        stored = {key: _stored(value) for key, value in drawn.items()}
        self._study.add_trial(create_trial(state=TrialState.RUNNING, params=stored, distributions=self._distributions))
        return self._trials()[-1].number

    def report(self, number: int, evaluation: int, value: float) -> bool:
        """Stores the metric at an evaluation (from 0) of a running trial; returns whether to prune it."""
        trial = self._running(number)
        if evaluation not in self._trials()[number].intermediate_values:
            trial.report(value, evaluation)
        return trial.should_prune()

    def end(
        self, number: int, state: str, value: Optional[float] = None,
        epochs: Optional[float] = None, seconds: Optional[float] = None, reason: Optional[str] = None,
    ) -> Record:  # fmt: skip
        """Ends a running trial. Args: value: of the metric; for complete ones only."""
        trial = self._running(number)
        outcome = {"state": state, "epochs": epochs, "seconds": seconds, "reason": reason}
        trial.set_user_attr("outcome", outcome)  # one write: each waits for the disk
        self._study.tell(trial, value, state=_TO_OPTUNA[state])
        return self.records()[number]

    def importances(self) -> Optional[Dict[str, float]]:
        """Importance of each parameter by PED-ANOVA (Watanabe, Bansal and Hutter, 2304.10255), in all 1; None: too few
        trials. Optuna's other evaluators need scikit-learn."""
        values = [each.value for each in self._trials() if each.state == TrialState.COMPLETE]
        if len(values) < 2 * _TARGET or min(values) == max(values):
            return None
        evaluator = PedAnovaImportanceEvaluator(target_quantile=max(0.1, _TARGET / len(values)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ties
            found = get_param_importances(self._study, evaluator=evaluator, params=list(self._distributions))
        return {name: float(share) for name, share in found.items()} if math.isfinite(sum(found.values())) else None

    def _check(self) -> None:
        """Raises errors of many kinds for trials that no sweep of this definition has."""
        if [each.name.lower() for each in self._study.directions] != [self._definition.direction]:
            raise ValueError("it has another direction")
        with self._storage.engine.connect() as connection:
            if connection.exec_driver_sql("PRAGMA foreign_key_check").first():  # SQLite does not enforce them
                raise ValueError("it has values of trials that are not there")
            # Asked of the file, as Optuna passes over all but one of the trials with the same number.
            of_study = "SELECT number FROM trials WHERE study_id = ? ORDER BY number"
            numbers = connection.exec_driver_sql(of_study, (self._study._study_id,)).scalars().all()
            if numbers != list(range(len(numbers))):
                raise ValueError("its trials are not numbered 0, 1, 2 and so on")
        trials = self._trials()
        optuna.create_study(direction=self._definition.direction).add_trials(trials)  # validates each
        for name, distribution in (pair for trial in trials for pair in trial.distributions.items()):
            spaces.check_distribution_compatibility(distribution, self._distributions[name])
        for number, record in enumerate(map(self._record, trials)):
            numbers = [each for each in (record.value, record.epochs, record.seconds) if each is not None]
            whole = record.trial == number and record.state in STATES
            whole = whole and set(record.parameters) == set(self._distributions)
            whole = whole and all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
            whole = whole and (record.state != COMPLETE or record.value is not None)
            if not whole or not isinstance(record.reason, (str, type(None))):
                raise ValueError(f"trial {number} is not what a sweep wrote")

    def _trials(self) -> List[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _running(self, number: int) -> Trial:
        return Trial(self._study, self._trials()[number]._trial_id)

    def _record(self, trial: FrozenTrial) -> Record:
        # A trial that was cut off between its outcome and its state runs again.
        outcome = trial.user_attrs.get("outcome", {}) if trial.state.is_finished() else {}
        return Record(
            trial.number,
            outcome.get("state", _FROM_OPTUNA.get(trial.state, RUNNING)),
            trial.value if trial.state == TrialState.COMPLETE else trial.intermediate_values.get(trial.last_step),
            {name: self._original(name, trial.params[name]) for name in self._distributions if name in trial.params},
            outcome.get("epochs"),
            outcome.get("seconds"),
            outcome.get("reason"),
        )

    def _draw(self) -> Parameters:
        """Parameters of the next trial: a function of the seed and of the trials before it."""
        trials = self._trials()
        before = [self._record(each).parameters for each in trials]
        number = len(trials)
        if self._definition.sampler == "grid":
            return grid(self._definition)[number]
        for attempt in range(_MAX_DRAWS):
            # In memory: parameters drawn one by one in the file could be cut off half-way.
            seed = key("sweep", self._definition.seed, number, attempt) & MASK32
            drawn_by = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
            sampler = drawn_by[self._definition.sampler](seed=seed)
            study = optuna.create_study(direction=self._definition.direction, sampler=sampler)
            study.add_trials(trials)
            drawn = study.ask(self._distributions).params
            parameters = {name: self._rounded(name, value) for name, value in drawn.items()}
            if parameters not in before:
                return parameters
        if self._definition.combinations() is None:
            return parameters
        return next(each for each in grid(self._definition) if each not in before)

    def _rounded(self, name: str, value: Any) -> Value:
        axis = self._definition.space[name]
        if axis.choices is not None:
            return self._original(name, value)
        if axis.integer:
            return value
        digits = _DIGITS if axis.step is None else 12  # 0.3, not 0.30000000000000004
        return min(max(float(f"{value:.{digits}g}"), axis.low), axis.high)

    def _original(self, name: str, value: Any) -> Value:
        """A value as the sweep file has it: the study stores lists as text."""
        choices = self._definition.space[name].choices or ()
        return next((each for each in choices if isinstance(each, list) and _stored(each) == value), value)


def _distribution(axis: Axis) -> BaseDistribution:
    if axis.choices is not None:
        return CategoricalDistribution([_stored(choice) for choice in axis.choices])
    if axis.integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log, step=int(axis.step or 1))
    return FloatDistribution(axis.low, axis.high, log=axis.log, step=axis.step)


def _stored(value: Value) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
