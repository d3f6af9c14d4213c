"""An elastic run in this process: the real launcher's watch and generations, with threads in the
place of ranks.

A rank here loads, begins, meets the others, makes steps, saves and ends as `training/elastic.py`
and the loop do, but an exchange is a dictionary, and a step adds one to a number. A test holds it
at a phase, and strikes there.
"""

import functools
import itertools
import signal
import threading
import time
from types import SimpleNamespace

from common.errors import DONE, FAILED, LEFT_OUT, STOPPED
from parallel import agent, generations, replacements
from parallel.generations import LeftOut, Member, Membership, Regroup, TooFew
from parallel.replacements import Replacements
from tests.parallel.store import Shared
from tests.waiting import wait_until

SECONDS = 20.0  # for a run to end
_POLL_SECONDS = 0.001


class Dead(BaseException):
    """This rank was killed."""


class Rank(threading.Thread):
    """A process of one stage.

    `poll`, `wait`, `send_signal` and `pid` are those of subprocess.Popen.
    """

    _numbers = itertools.count(10**6)

    def __init__(self, run, rank, life):
        super().__init__(daemon=True)
        self.run_ = run
        self.rank = rank
        self.life = life
        self.pid = next(self._numbers)
        self.code = None
        self.phase = ""
        self.step = None
        self.rounds = 0
        self.listens = self.told = self.is_held = False

    def poll(self):
        return self.code

    def wait(self):
        self.join(SECONDS)
        return self.code

    def send_signal(self, number):
        if self.code is not None:
            return
        if number == signal.SIGUSR1 and self.listens:
            self.told = True
        elif number != signal.SIGINT:  # which ranks ignore
            self.code = -number
            self.run_.store.broken.add(self)

    def run(self):
        try:
            code = self._live()
        except (Dead, RuntimeError):
            return
        except LeftOut:
            code = LEFT_OUT
        except TooFew:
            code = FAILED
        if self.code is None:
            self.code = code

    def _live(self):
        self._reach("loading")
        self.listens = True
        run = self.run_
        self.membership = Membership(
            run.store, Member(self.rank, self.life), 0, 1, run.minimum, silence=5.0
        )
        if self.life:
            self._reach("waiting")
            self.membership.join()
        else:
            self.membership.found(run.replicas)
        while True:
            try:
                return self._generation()
            except Regroup:
                self.membership.end()
                self.membership.say_alive()
            self._reach("regrouping")
            self.membership.follow(lambda: self.told)

    def _generation(self):
        run = self.run_
        self.rounds = 0
        self._reach("meeting" if not self.life or self.membership.number > 2 else "joining")
        known = [step for step in self._gather(self.step) if step is not None]
        self.step = min(known) if known else (run.saved or 0)
        if any(self._gather(self.told)):
            return self._save(self.step if known else run.saved)
        while self.step < run.total:
            self._gather(None)
            self.step += 1
            self._reach("training")
            told, wanted = zip(
                *self._gather((self.told, run.takes_in and self.membership.is_wanted()))
            )
            if any(told):
                return self._save(self.step)
            if any(wanted):
                raise Regroup
        self._gather(None)
        self._reach("ended")
        return DONE

    def _save(self, step):
        self._reach("saving")
        if self._is_main:
            self.run_.saved = step
            self.membership.note_saved()
        self._reach("saved")
        self._gather(None)
        self._reach("leaving")
        return STOPPED

    @property
    def _is_main(self):
        return self.membership.members[0] == self.membership.member

    def _gather(self, value):
        """The value of every member. Raises Regroup once the generation is over."""
        members = self.membership.members
        values = self.run_.values.setdefault((self.membership.number, self.rounds), {})
        self.rounds += 1
        values[self.membership.member] = value
        while len(values) < len(members):
            self._wait()
            if self.membership.is_over():
                raise Regroup
        return [values[member] for member in members]

    def _reach(self, phase):
        self.phase = phase
        while (self.rank, phase) in self.run_.held:
            self.is_held = True
            self._wait()
        self.is_held = False
        if self.code is not None:
            raise Dead

    def _wait(self):
        if self.code is not None:
            raise Dead
        time.sleep(_POLL_SECONDS)


class Run:
    """A launcher that watches ranks. held: (rank, phase) at which ranks wait. takes_in: whether the
    run takes in replicas that wait. saved: the step of the last checkpoint."""

    def __init__(self, patch, replicas=3, total=10**6, held=(), minimum=1):
        self.replicas = replicas
        self.total = total
        self.minimum = minimum
        self.store = Shared()
        self.values = {}
        self.held = set(held)
        self.saved = None
        self.takes_in = True
        self.lives = []
        patch.setattr("torch.distributed.TCPStore", lambda *_, **__: self.store)
        patch.setattr("os.killpg", self._kill)
        patch.setattr(agent.signal, "signal", lambda *_: None)
        for module, name, seconds in (
            (agent, "_WATCH_SECONDS", 0.002),
            (agent, "_SAME_SECONDS", 0.0),
            (agent, "_END_SECONDS", 0.02),
            (replacements, "_LOOK_SECONDS", 0.0),
            (replacements, "_SHORT_SECONDS", 0.0),
            (replacements, "_TOGETHER_SECONDS", 0.01),
            (generations, "_GRACE_SECONDS", 0.2),
            (generations, "_POLL_SECONDS", 0.002),
        ):
            patch.setattr(module, name, seconds)
        self.every = {}
        self.ranks = {}
        for rank in range(replicas):
            self.start(rank, 0)
        self.signals = agent.Signals()
        self.signals.watch(self.ranks)
        elastic = Replacements(self.ranks, ("", 0), 1, self.start, range(replicas))
        others = SimpleNamespace(finished=lambda: False, news=lambda: None, all_silent=lambda: True)
        self.outcome = None
        watch = functools.partial(agent._watch, self.ranks, others, self.signals, lambda: elastic)
        self._fault = None
        self._launcher = threading.Thread(target=self._watched, args=(watch,), daemon=True)
        self._launcher.start()

    def _watched(self, watch):
        # A test may take the store away: what the watch raises then, maybe after the test, is for
        # `end` alone.
        try:
            self.outcome = watch()
        except RuntimeError as fault:
            self._fault = fault

    def start(self, rank, life):
        process = self.every[rank, life, len(self.every)] = Rank(self, rank, life)
        self.lives.append((rank, life))
        self.ranks[rank] = process
        process.start()

    def _kill(self, pid, number):
        for rank in list(self.every.values()):
            if rank.pid == pid:
                rank.send_signal(number)

    def reach(self, rank, phase, life=0):
        """Wait until the newest process of a rank is at a phase, and held there if it is to be."""
        held = (rank, phase) in self.held

        def reached():
            for (number, of, _), process in list(self.every.items()):
                if (number, of) != (rank, life) or process.code is not None:
                    continue
                if process.phase == phase and (process.is_held or not held):
                    return True
            return False

        wait_until(reached, SECONDS)

    def step(self):
        """The last step that all ranks have done which have done any."""
        steps = [each.step for each in list(self.ranks.values()) if each.step is not None]
        return min(steps, default=0)

    def signal(self, number):
        """A signal to the launcher."""
        self.signals._receive(number, None)

    def end(self):
        """The outcome of the watch, which must end."""
        self._launcher.join(SECONDS)
        assert not self._launcher.is_alive(), [
            (each.rank, each.life, each.phase) for each in self.ranks.values()
        ]
        if self._fault is not None:
            raise self._fault
        assert all(each.code is not None for each in self.every.values())
        return self.outcome
