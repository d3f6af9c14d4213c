"""Generations of an elastic run: one value for all, whoever is lost while they agree on it."""

import itertools
import random
import threading

import pytest

from parallel import generations
from parallel.generations import Generations, LeftOut, Member, Membership, TooFew, choice
from tests.parallel.store import Shared

A, B, C = (Member(replica, 0) for replica in range(3))
NEW = Member(1, 1)


@pytest.mark.parametrize(
    ("here", "gone", "waited", "chosen"),
    [
        ((A, B, C), (), None, (A, B, C)),
        ((A, C, NEW), (B,), None, (A, C, NEW)),  # new ones come last: the first is the oldest
        ((A, C), (), None, None),  # B works on and does not know yet
        ((A, C), (), 0.5, None),  # B is waited for
        ((A, C), (), 3.0, (A, C)),  # not longer than its limit
        ((B, C), (), 3.0, None),  # A has a longer one
        ((A, B, C), (B,), 0.0, (A, C)),  # B came and died
        ((A, B, NEW), (C, NEW), 0.0, (A, B)),  # a new one did
        ((B,), (A, C), 0.0, None),  # fewer than the minimum: others may come
        ((B,), (A, C), 10, None),
        ((B,), (A, C), 11, ()),
        ((NEW, C), (A, B), 0.0, (C, NEW)),
    ],
)
def test_the_next_generation_is_all_who_can_come_and_waits_only_for_those(
    here, gone, waited, chosen
):
    limits = {A: 5.0, B: 3.0, C: 3.0}
    found = choice(
        (A, B, C), here=here, gone=gone, limits=limits, waited=waited, minimum=2, silence=10
    )
    assert found == chosen


def test_who_has_not_begun_or_says_that_it_is_alive_is_waited_for_longer():
    """Before it is over all members of a later generation had begun: they were there when it was
    decided on."""
    store = Shared()
    one, other = (Membership(store, member, 0, 1, 1, silence=30.0) for member in (A, B))
    one.found(3)
    assert one._limits() == {A: 1.0, B: 50.0, C: 50.0}
    other.found(3)
    other.say_alive()
    assert one._limits() == {A: 1.0, B: 30.0, C: 50.0}
    one.number = 1
    assert one._limits() == {A: 1.0, B: 1.0, C: 1.0}
    other._silence = 0.5
    assert other._limits() == {A: 0.5, B: 0.5, C: 50.0}


def test_a_replica_has_begun_once_one_of_its_processes_has_and_all_have_met_once_all_have():
    store = Shared()
    seen = Generations(store, stages=2)
    processes = [
        Membership(store, member, stage, stages=2, minimum=1, silence=1.0)
        for member in (A, B, C)
        for stage in (0, 1)
    ]
    assert not seen.is_founded() and not seen.has_met()
    assert not seen.has_begun(A) and seen.has_begun(NEW)
    for each in processes[:3]:
        each.found(3)
    assert seen.is_founded() and not seen.has_met()
    assert [seen.has_begun(member) for member in (A, B, C)] == [True, True, False]
    for each in processes[3:]:
        each.found(3)
    assert seen.has_met()


def test_the_first_generation_is_over_as_it_is_founded_if_a_member_is_lost_already():
    store = Shared()
    Generations(store, 1).bury(B)
    one = Membership(store, A, 0, stages=1, minimum=1, silence=1.0)
    one.found(3)
    assert one.is_over()


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(generations, "_GRACE_SECONDS", 0.3)
    return Shared()


class Process(threading.Thread):
    """A process of a replica, which goes on to the next generation, or joins."""

    def __init__(self, store, member, stage=0, stages=1, silence=2.0, delay=0.0):
        super().__init__(daemon=True)
        self.membership = Membership(
            store, member, stage, stages=stages, minimum=1, silence=silence
        )
        self.delay = delay
        self.error = None
        self.stopping = lambda: False
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
                self.membership.follow(self.stopping)
        except (LeftOut, TooFew, RuntimeError) as error:
            self.error = error


@pytest.mark.parametrize("seed", range(12))
def test_whoever_dies_and_whenever_the_living_have_one_generation(store, seed):
    """Some of 3 replicas of 2 stages never report, one may report and then be buried: the rest
    agree."""
    draw = random.Random(seed)
    every = [
        Process(store, Member(r, 0), s, 2, delay=draw.uniform(0, 0.1))
        for r, s in itertools.product((0, 1, 2), (0, 1))
    ]
    lost = draw.choice([(), (0,), (1,), (2,), (0, 1)])
    dying = {
        each for each in every if each.membership.member.replica in lost and draw.random() < 0.7
    }
    for each in every:
        if each not in dying:
            each.start()
    for replica in lost:
        Generations(store, 1).bury(Member(replica, 0))
    living = [each for each in every if each.membership.member.replica not in lost]
    for each in living:
        each.join(10)
        assert each.error is None
    assert len({each.membership.members for each in living}) == 1
    found = living[0].membership.members
    assert set(found) >= {each.membership.member for each in living}
    assert {member.replica for member in found} - {
        each.membership.member.replica for each in living
    } <= set(lost)


def test_the_minority_of_a_cut_network_does_not_go_on(store):
    """Two that reach the store agree without the third; it finds no store, or, later, that it was
    left out."""
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
    old = [
        Process(store, Member(replica, 0), stage, 2)
        for replica, stage in itertools.product((0, 2), (0, 1))
    ]
    Generations(store, 2).bury(B)
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
    Generations(store, 1).bury(B)
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
        Generations(store, 1).bury(member)
    one.start()
    one.join(10)
    assert isinstance(one.error, TooFew)


@pytest.mark.parametrize("dies", [False, True])
def test_too_few_wait_until_their_main_process_has_closed_the_run_or_is_lost(store, dies):
    """Their launcher would end it as soon as one of them has ended."""
    main, other = (
        Process(store, member, stage=stage, stages=2) for member, stage in ((A, 0), (A, 1))
    )
    third = [Process(store, C, stage=stage, stages=2) for stage in (0, 1)]
    Generations(store, 2).bury(B)
    for each in (main, other, *third):
        each.membership._minimum = 3
        each.start()
    for each in (main, other, *third):
        each.join(10)
        assert isinstance(each.error, TooFew)
    waiting = [
        threading.Thread(target=each.membership.close, args=(pytest.fail,), daemon=True)
        for each in (other, *third)
    ]
    for each in waiting:
        each.start()

    def close():
        assert all(each.is_alive() for each in waiting)

    threading.Event().wait(0.1)
    if dies:
        close()
        Generations(store, 2).bury(A)
    else:
        main.membership.close(close)
    for each in waiting:
        each.join(10)
        assert not each.is_alive()


def test_too_few_go_on_together_if_they_only_have_to_save(store):
    """The one that was told to stop decides for the other."""
    told, other = (Process(store, member, silence=60.0) for member in (A, C))
    told.stopping = lambda: True
    Generations(store, 1).bury(B)
    for each in (told, other):
        each.membership._minimum = 3
        each.start()
    for each in (told, other):
        each.join(10)
        assert each.error is None and each.membership.members == (A, C)


def test_a_new_life_waits_for_the_first_generation_and_does_not_found_one(store):
    Generations(store, 1).bury(B)
    new = Process(store, NEW)
    new.start()
    threading.Event().wait(0.1)
    assert not store.check(["elastic/members/1"])
    others = [Process(store, member) for member in (A, C)]
    for each in others:
        each.start()
    for each in (new, *others):
        each.join(10)
    assert others[0].membership.members[:2] == (A, C)


def test_all_lost_means_that_nobody_lives(store):
    Process(store, A)
    seen = Generations(store, 1)
    assert seen.living() == [A, B, C]
    for member in (A, B, C):
        seen.bury(member)
    assert not seen.living() and seen.is_over()


def test_what_all_have_in_common_is_what_the_first_had(store):
    one, other = (
        Membership(store, member, 0, stages=1, minimum=1, silence=1.0) for member in (A, B)
    )
    assert one.common("code", "x") == "x" and other.common("code", "y") == "x"
