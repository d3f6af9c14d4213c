"""Which branches are planned: never more images than allowed, as large batches as these allow,
spread over the run."""

import pytest

from common.errors import ConfigError
from tools.branching import decision, report
from tools.branching import plan as plans
from tools.branching.plan import RULES, Branch

RUN = {"batch": 768, "per_epoch": 78, "total": 5226}


def plan(saved=range(78, 5227, 78), points=3, share=0.3, **changed):
    return plans.make(list(saved), points=points, share=share, **{**RUN, **changed})


@pytest.mark.parametrize(
    ("share", "largest", "steps"),
    # 4, 6, 8 or 10 branches from each of three checkpoints; 8 updates of the largest batch at
    # least.
    [(0.04, 2, 16), (0.1, 2, 42), (0.12, 4, 32), (0.3, 8, 64), (0.6, 8, 128), (0.75, 16, 128)],
)
def test_branches_have_as_large_batches_as_the_share_allows_and_then_as_many_steps(
    share, largest, steps
):
    found = plan(share=share)
    assert (found.largest, found.steps) == (largest, steps)
    branches = found.branches()
    assert len(set(branches)) == len(branches) == 3 * (2 + len(RULES) * len(found.multiples))
    assert found.images == len(branches) * steps * 768 and found.share == found.images / (
        5226 * 768
    )
    # Not more than allowed, and less by no more than a step of the largest batch in each branch.
    assert share - len(branches) * largest / 5226 < found.share <= share
    # What the next larger batch is said to take is enough for it, and a little less is not.
    more = plans.share_for(found, 2 * largest)
    if 2 * largest * 4 <= 78:
        assert (
            plan(share=more + 1e-9).largest == 2 * largest
            and plan(share=more - 0.001).largest < 2 * largest
        )


def test_an_epoch_has_four_updates_of_the_largest_batch_or_more():
    assert plan(share=5.0).largest == 16
    assert plan(share=5.0, per_epoch=8, saved=range(8, 5226, 8)).largest == 2


@pytest.mark.parametrize(
    ("per_epoch", "end"),
    [
        (16, "2 x recovered; --share 1.16 --output FOLDER tries 4 x"),
        (
            15,
            "2 x recovered; an epoch of 15 steps is too short for 4 x: branch a run with a smaller batch",
        ),
    ],
)
def test_a_larger_share_is_advised_only_where_it_allows_a_larger_batch(per_epoch, end):
    """The shortest epoch for which one does, and the longest for which none helps."""
    found = plan(range(per_epoch, 500, per_epoch), share=1.0, per_epoch=per_epoch, total=500)
    points = [judged(found, step) for step in found.points]
    assert end in "\n".join(report.lines(found, points, None))


def judged(found, step):
    """A checkpoint at which all batches have recovered."""
    losses = dict.fromkeys(found.branches(), 1.0)
    return next(point for point in decision.judge(found, losses) if point.step == step)


def test_at_each_checkpoint_the_spread_is_measured_first():
    step = plan(share=0.12).points[0]
    expected = [Branch(step, 1), Branch(step, 1, order=1)]
    expected += [Branch(step, multiple, rule) for multiple in (2, 4) for rule in ("sqrt", "linear")]
    branches = plan(share=0.12).branches()
    assert branches[:6] == expected and branches[6].step > step
    names = [branch.name for branch in expected[1:4]]
    assert names == [f"step-{step:08d}-{kind}" for kind in ("order-1", "x2-sqrt", "x2-linear")]


@pytest.mark.parametrize(
    ("saved", "points", "expected"),
    [
        (range(100, 1100, 100), 3, [200, 500, 800]),
        (range(100, 1100, 100), 1, [500]),
        ([5, 10, 20, 1000], 3, [5, 10, 20]),
        ([0, 10, 20, 500, 1000], 2, [10, 500]),
    ],
)
def test_checkpoints_are_spread_over_those_before_the_end(saved, points, expected):
    assert plan(saved, points, share=5.0, total=1000).points == expected


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (
            {"saved": [5148, 5226]},
            r"^1 checkpoint before the run's end, but --points is 3; train with checkpoint\.keep_last=1000, which "
            r"keeps all \(it may be given when a run resumes\), or give --points 1$",
        ),
        ({"saved": [5226]}, r"^0 checkpoints .* when a run resumes\)$"),
        (
            {"share": 0.03},
            r"^a share of 0.03 of the run is 157 steps, but the shortest branches from 3 checkpoints take 192; give "
            r"--share 0.04 or fewer --points$",
        ),
        (
            {"per_epoch": 7},
            r"^an epoch has 7 steps, too few for twice the batch; branch a run with a smaller batch$",
        ),
    ],
)
def test_what_cannot_be_branched_is_refused_with_the_remedy(changed, fault):
    with pytest.raises(ConfigError, match=fault):
        plan(**changed)
