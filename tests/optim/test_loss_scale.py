"""The loss scale against its rule, counted by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optim.loss_scale import LossScale

CPU = torch.device("cpu")


def after(scale, *finite):
    for each in finite:
        scale.update(torch.tensor(each))
    return scale


@pytest.mark.parametrize(
    ("start", "dynamic", "finite", "expected"),
    [
        pytest.param(128.0, False, [False] * 30 + [True] * 2500, 128.0, id="a static one stays"),
        pytest.param(128.0, True, [False, True, False], 32.0, id="halved twice"),
        pytest.param(128.0, True, [True] * 1999, 128.0, id="not yet doubled"),
        pytest.param(128.0, True, [True] * 4000, 512.0, id="doubled twice"),
        pytest.param(128.0, True, [*[True] * 1999, False, *[True] * 1999], 64.0, id="counted anew"),
        pytest.param(
            128.0, True, [*[True] * 1999, False, *[True] * 2000], 128.0, id="doubled after that"
        ),
        pytest.param(1.0, True, [False] * 40, 2.0**-14, id="never below"),
        pytest.param(2.0**23, True, [True] * 4000, 2.0**24, id="never above"),
    ],
)
def test_the_scale_after_a_history(start, dynamic, finite, expected):
    """The bounds are 2**-14 and 2**24: halved or doubled further, 1 / scale or the loss would leave
    float32."""
    assert after(LossScale(start, dynamic, CPU), *finite).scale.item() == expected


@pytest.mark.parametrize("dynamic", [False, True])
def test_steps_left_out_are_counted_in_all_and_in_row(dynamic):
    """A step's result carries the counters; the steps after it do not change them."""
    scale = LossScale(128.0, dynamic, CPU)
    given = []
    for finite in (False, False, True, False):
        after(scale, finite)
        given.append((scale.skipped, scale.skipped_in_row, scale.scale))
    scales = [64.0, 32.0, 32.0, 16.0] if dynamic else [128.0] * 4
    seen = [tuple(tensor.item() for tensor in each) for each in given]
    assert seen == list(zip((1, 2, 2, 3), (1, 2, 0, 1), scales))


def test_a_loaded_scale_goes_on_where_the_saved_one_was():
    """What was saved is a copy."""
    original = after(LossScale(128.0, True, CPU), *[True] * 10, False, False, *[True] * 1990)
    state = original.state_dict()
    resumed = LossScale(1.0, True, CPU)
    before = [tensor.item() for tensor in state.values()]
    resumed.load_state_dict(state)
    for _ in range(15):
        assert original.state_dict() == resumed.state_dict()
        after(original, True)
        after(resumed, True)
    assert original.scale.item() == 64.0  # doubled on the way, from 32
    assert [tensor.item() for tensor in state.values()] == before


def test_nothing_waits_for_the_device():
    """On tensors without values, as those that a device has not computed yet, reading one
    raises."""
    with FakeTensorMode():
        scale = LossScale(128.0, True, torch.device("cuda"))
        scale.update(torch.ones((), dtype=torch.bool, device="cuda"))
        with pytest.raises(Exception, match="_local_scalar_dense"):
            scale.skipped.item()
