"""Generations of an elastic run: one value for all, whoever is lost while they agree on it."""

import itertools
import random
import threading

import pytest

from parallel import generations
from parallel.generations import Generations, LeftOut, Member, Membership, TooFew, choice

A, B, C = (Member(replica, 0) for replica in range(3))
NEW = Member(1, 1)


class Shared:
    """A store in this process, which threads share; a thread in `broken` is cut off from it."""

    def __init__(self):
        self.values, self.lock, self.broken = {}, threading.Lock(), set()

    def _reached(self):
        if threading.current_thread() in self.broken:
            raise RuntimeError("no way to the store")
        return self.lock

    def append(self, key, value):
        with self._reached():
            self.values[key] = self.values.get(key, b"") + value.encode()

    def add(self, key, amount):
        with self._reached():
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys):
        with self._reached():
            return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        with self._reached():
            if self.values.get(key, b"").decode() == expected:
                self.values[key] = desired.encode()
            return self.values[key]

    def get(self, key):
        with self._reached():
            return self.values[key]

    def set(self, key, value):
        with self._reached():
            self.values[key] = value.encode()


@pytest.mark.parametrize(
    ("here", "alive", "gone", "waited", "chosen"),
    [
        ((A, B, C), (), (), None, (A, B, C)),
        ((A, C, NEW), (), (B,), None, (A, C, NEW)),  # new ones come last: the first is the oldest
        ((A, C), (), (), None, None),  # B works on and does not know yet
        ((A, C), (), (), 0.5, None),  # B may say that it is alive
        ((A, C), (), (), 1.5, (A, C)),  # it did not
        ((A, C), (B,), (), 1.5, None),  # it did: it will come
        ((A, C), (B,), (), 11, (A, C)),  # it did not come for as long as `silence`
        ((A, B, C), (), (B,), 0.0, (A, C)),  # B came and died
        ((B,), (), (A, C), 0.0, None),  # fewer than the minimum: others may come
        ((B,), (), (A, C), 11, ()),
        ((NEW, C), (), (A, B), 0.0, (C, NEW)),
    ],
)
def test_the_next_generation_is_all_who_can_come_and_waits_only_for_those(here, alive, gone, waited, chosen):
    assert choice((A, B, C), here, alive, gone, waited, minimum=2, silence=10) == chosen


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(generations, "_GRACE_SECONDS", 0.3)
    return Shared()


class Process(threading.Thread):
    """A process of a replica, which goes on to the next generation, or joins."""

    def __init__(self, store, member, stage=0, stages=1, silence=2.0, delay=0.0):
        super().__init__(daemon=True)
        self.membership = Membership(store, member, stage, stages, 1, silence)
        self.delay, self.error = delay, None
        if not member.life:
            self.membership.found(3)

    def run(self):
        threading.Event().wait(self.delay)
        try:
            self.membership.catch_up()
            if self.membership.member.life:
                self.membership.join()
            else:
                self.membership.end()
                self.membership.follow()
        except (LeftOut, TooFew, RuntimeError) as error:
            self.error = error


@pytest.mark.parametrize("seed", range(12))
def test_whoever_dies_and_whenever_the_living_have_one_generation(store, seed):
    """Some of 3 replicas of 2 stages never report, one may report and then be buried: the rest agree."""
    draw = random.Random(seed)
    every = [
        Process(store, Member(r, 0), s, 2, delay=draw.uniform(0, 0.1)) for r, s in itertools.product((0, 1, 2), (0, 1))
    ]
    lost = draw.choice([(), (0,), (1,), (2,), (0, 1)])
    dying = {each for each in every if each.membership.member.replica in lost and draw.random() < 0.7}
    for each in every:
        if each not in dying:
            each.start()
    for replica in lost:
        Generations(store).bury(Member(replica, 0))
    living = [each for each in every if each.membership.member.replica not in lost]
    for each in living:
        each.join(10)
        assert each.error is None
    assert len({each.membership.members for each in living}) == 1
    found = living[0].membership.members
    assert set(found) >= {each.membership.member for each in living}
    assert {member.replica for member in found} - {each.membership.member.replica for each in living} <= set(lost)


def test_the_minority_of_a_cut_network_does_not_go_on(store):
    """Two that reach the store agree without the third; it finds no store, or, later, that it was left out."""
    every = [Process(store, Member(replica, 0)) for replica in range(3)]
    late = Process(store, C)
    store.broken.add(every[2])
    for each in every:
        each.start()
    for each in every:
        each.join(10)
    assert every[0].membership.members == every[1].membership.members == (A, B)
    assert isinstance(every[2].error, RuntimeError)
    with pytest.raises(LeftOut):
        late.membership.follow()


def test_a_new_life_is_wanted_once_all_its_processes_wait_and_comes_after_the_old_members(store):
    old = [Process(store, Member(replica, 0), stage, 2) for replica, stage in itertools.product((0, 2), (0, 1))]
    Generations(store).bury(B)
    new = [Process(store, NEW, stage, 2) for stage in (0, 1)]
    new[0].start()
    threading.Event().wait(0.1)
    assert not old[0].membership.is_wanted()
    new[1].start()
    threading.Event().wait(0.1)
    assert old[0].membership.is_wanted()
    for each in old:
        each.start()
    for each in (*old, *new):
        each.join(10)
        assert each.membership.members == (A, C, NEW) and each.membership.number == 1


def test_a_replica_that_begins_after_others_went_on_without_it_is_left_out(store):
    others = [Process(store, member) for member in (A, C)]
    Generations(store).bury(B)
    for each in others:
        each.start()
    for each in others:
        each.join(10)
    with pytest.raises(LeftOut):
        Process(store, B)


def test_too_few_end_once_no_other_comes(store):
    one = Process(store, A, silence=0.5)
    one.membership._minimum = 2
    for member in (B, C):
        Generations(store).bury(member)
    one.start()
    one.join(10)
    assert isinstance(one.error, TooFew)


def test_all_lost_means_that_nobody_lives(store):
    Process(store, A)
    seen = Generations(store)
    assert seen.living() == [A, B, C]
    for member in (A, B, C):
        seen.bury(member)
    assert not seen.living() and seen.is_over()


def test_what_all_have_in_common_is_what_the_first_had(store):
    one, other = (Membership(store, member, 0, 1, 1, 1.0) for member in (A, B))
    assert one.common("code", "x") == "x" and other.common("code", "y") == "x"
