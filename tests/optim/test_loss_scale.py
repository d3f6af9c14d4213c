"""The loss scale against its rule, counted by hand."""

import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optim.loss_scale import LossScale

CPU = torch.device("cpu")


def after(scale, *finite):
    for each in finite:
        scale.update(torch.tensor(each))
    return scale


def counts(scale):
    return scale.skipped.item(), scale.skipped_in_row.item()


def test_a_static_scale_stays_whatever_happens():
    scale = after(LossScale(128.0, False, CPU), *[False] * 30, *[True] * 2500)
    assert scale.scale.item() == 128.0


def test_a_dynamic_scale_halves_after_each_step_that_is_not_finite():
    assert after(LossScale(128.0, True, CPU), False).scale.item() == 64.0
    assert after(LossScale(128.0, True, CPU), False, True, False).scale.item() == 32.0


def test_a_dynamic_scale_doubles_after_every_2000_finite_steps():
    scale = after(LossScale(128.0, True, CPU), *[True] * 1999)
    assert scale.scale.item() == 128.0
    assert after(scale, True).scale.item() == 256.0
    assert after(scale, *[True] * 1999).scale.item() == 256.0
    assert after(scale, True).scale.item() == 512.0


def test_a_step_that_is_not_finite_starts_the_count_anew():
    scale = after(LossScale(128.0, True, CPU), *[True] * 1999, False, *[True] * 1999)
    assert scale.scale.item() == 64.0
    assert after(scale, True).scale.item() == 128.0


def test_a_dynamic_scale_stays_within_float32_and_above_zero():
    """The bounds are 2**-14 and 2**24: halved or doubled further, 1 / scale or the loss would leave float32."""
    assert after(LossScale(1.0, True, CPU), *[False] * 40).scale.item() == 2.0**-14
    scale = LossScale(2.0**23, True, CPU)
    assert after(scale, *[True] * 2000).scale.item() == 2.0**24
    assert after(scale, *[True] * 2000).scale.item() == 2.0**24


@pytest.mark.parametrize("dynamic", [False, True])
def test_steps_left_out_are_counted_in_all_and_in_row(dynamic):
    scale = LossScale(128.0, dynamic, CPU)
    seen = [counts(after(scale, finite)) for finite in (False, False, True, False)]
    assert seen == [(1, 1), (2, 2), (2, 0), (3, 1)]


def test_what_was_handed_out_keeps_its_value():
    """A step's result carries the counters; the steps after it must not change them."""
    scale = after(LossScale(128.0, True, CPU), False)
    given = scale.scale, scale.skipped, scale.skipped_in_row
    after(scale, False, False)
    assert [tensor.item() for tensor in given] == [64.0, 1, 1]


def saved(scale):
    """Through a file that may hold only tensors."""
    buffer = io.BytesIO()
    torch.save(scale.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_loaded_scale_goes_on_where_the_saved_one_was():
    history = [True] * 10 + [False, False] + [True] * 1990
    original = after(LossScale(128.0, True, CPU), *history)
    resumed = LossScale(1.0, True, CPU)
    resumed.load_state_dict(saved(original))
    for _ in range(15):
        assert [tensor.item() for tensor in original.state_dict().values()] == [
            tensor.item() for tensor in resumed.state_dict().values()
        ]
        after(original, True)
        after(resumed, True)
    assert original.scale.item() == 64.0  # doubled on the way, from 32


def test_saved_and_loaded_states_are_copies():
    scale = after(LossScale(128.0, True, CPU), False)
    state = scale.state_dict()
    resumed = LossScale(1.0, True, CPU)
    resumed.load_state_dict(state)
    after(scale, False)
    after(resumed, False)
    assert [tensor.item() for tensor in state.values()] == [64.0, 0, 1, 1]


def test_nothing_waits_for_the_device():
    """On tensors without values, as those that a device has not computed yet, reading one raises."""
    with FakeTensorMode():
        scale = LossScale(128.0, True, torch.device("cuda"))
        scale.update(torch.ones((), dtype=torch.bool, device="cuda"))
        assert scale.scale.device.type == "cuda"
        with pytest.raises(Exception, match="_local_scalar_dense"):
            scale.skipped.item()
