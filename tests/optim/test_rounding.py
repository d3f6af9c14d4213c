"""Stochastic rounding against NumPy's float16, against exact probabilities, and its bits against
the mixer."""

import shutil
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optim import compilation, layout, rounding
from optim.layout import ROW
from optim.rounding import RoundingBits, round_stochastically
from recipe.randomness import MASK32, bits32, key, mix32
from tests.optim.states import INSTRUCTIONS, compile_for

CPU = torch.device("cpu")
KEEP = torch.tensor(True)
LEAVE = torch.tensor(False)
# One or more of every kind: normals, around powers of two, at both ends; subnormals; below all of
# them.
VALUES = [
    1.0003,
    3.14159,
    0.1,
    1234.567,
    4097.3,
    7.0e-5,
    2.0 - 2.0**-12,
    2.0 + 2.0**-11,
    2.0**-14 * (1 + 2.0**-12),
    2.0**-14 * (1 - 2.0**-13),
    65503.9,
    65480.0,
    32769.5,
    2.0**-15 * 1.00037,
    2.0**-20 * 1.3,
    2.0**-24 * 1.5,
    2.0**-24 * 0.7,
    2.0**-25,
    2.0**-28 * 1.7,
    2.0**-30,
]
VALUES = np.array([sign * value for value in VALUES for sign in (1, -1)], np.float32)


def in_rows(values):
    """A tensor, filled up to whole rows."""
    values = torch.as_tensor(values)
    return torch.cat([values, torch.zeros(-len(values) % ROW, dtype=values.dtype)])


def rounded(source, seed=0, step=0, slot="weight", name="stem.weight"):
    count = len(source)
    source = in_rows(source)
    before = source.clone().view(torch.int32)
    out = torch.full(source.shape, 7.0, dtype=torch.float16)
    bits = RoundingBits({name: (0, count)}, len(source), seed, CPU)
    round_stochastically(source, bits, step, slot, out=out, keep=KEEP)
    assert torch.equal(source.view(torch.int32), before), "the source is changed"
    return out.numpy()[:count]


def random_bits(count=1 << 17, seed=0, step=0, slot="weight", name="stem.weight", noise=False):
    """uint32 [count]: the words of a slot, or of each the 13 bits that round it."""
    bits = RoundingBits({name: (0, count)}, len(in_rows(torch.zeros(count))), seed, CPU)
    draw, chosen = bits.draw(step, slot)
    words = rounding.random_bits(bits.rows, bits.lanes, draw)
    return (chosen(words) if noise else words).flatten()[:count].numpy().view(np.uint32)


def neighbours(source):
    """The float16 values next below and next above each float32, both itself if it is one."""
    nearest = source.astype(np.float16)
    with np.errstate(over="ignore"):  # what follows 65504 is computed, but not taken
        previous, following = (np.nextafter(nearest, np.float16(end)) for end in (-np.inf, np.inf))
    return np.where(nearest <= source, nearest, previous), np.where(
        nearest >= source, nearest, following
    )


def floats_of_all_kinds():
    """Random float32 bit patterns up to 65504, half of them within float16's own range of
    exponents."""
    random = np.random.RandomState(0)
    patterns = random.randint(0, 2**32, 1 << 18, np.uint32).view(np.float32)
    scaled = (random.randn(1 << 17) * 2.0 ** random.randint(-30, 14, 1 << 17)).astype(np.float32)
    values = np.concatenate([patterns, scaled, VALUES])
    return values[np.abs(values) <= 65504]


def test_the_result_is_one_of_the_two_neighbours_and_each_of_them_at_times():
    """And a larger value is never rounded lower by the same bits."""
    source = floats_of_all_kinds()
    below, above = neighbours(source)
    result = rounded(source)
    assert np.all((result == below) | (result == above))
    between = below != above
    assert np.any(between & (result == below))
    assert np.any(between & (result == above))
    larger = source + np.abs(source) * 2.0 ** np.random.RandomState(2).randint(-24, -8, len(source))
    assert np.all(result <= rounded(np.minimum(larger, 65504).astype(np.float32)))


def test_what_float16_can_represent_is_kept_bit_for_bit():
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]  # both zeros among them
    for step in range(5):
        result = rounded(values.astype(np.float32), step=step)
        np.testing.assert_array_equal(result.view(np.uint16), values.view(np.uint16))


def test_over_all_noise_the_mean_is_the_value():
    """That of a subnormal result is the value rounded to a multiple of 2**-37, as the docstring
    says. Float64 holds all of these numbers and their sum."""
    noise = torch.arange(2**13, dtype=torch.int32)
    values = VALUES.astype(np.float64)
    found = (
        rounding.rounded(torch.from_numpy(VALUES)[:, None].repeat(1, 2**13), noise).double().numpy()
    )
    exact = np.where(np.abs(values) >= 2.0**-14, values, np.round(values * 2.0**37) / 2.0**37)
    np.testing.assert_array_equal(found.mean(1), exact)
    below, above = neighbours(VALUES[:, None])
    assert np.all((found == below) | (found == above))


def test_beyond_the_largest_float16_it_saturates_and_nan_stays():
    source = np.array([65504, 65504.004, 65519.99, 65520, 1e6, 3e38, np.inf], np.float32)
    for step in range(5):
        np.testing.assert_array_equal(rounded(source, step=step), np.full(7, 65504, np.float16))
        np.testing.assert_array_equal(rounded(-source, step=step), np.full(7, -65504, np.float16))
    source = np.array([1.0, np.nan, 2.0, -np.nan, 1e6], np.float32)
    np.testing.assert_array_equal(
        rounded(source), np.array([1.0, np.nan, 2.0, np.nan, 65504], np.float16)
    )


def test_the_bits_are_those_of_the_documented_key():
    seed = 2**62 + 5
    step = 72799
    name = "blocks.3.0.conv_dw.weight"
    numbers = np.arange(10_000, dtype=np.uint64)
    for slots, words in ((("weight", "momentum_buffer"), ()), (("mean",), ("mean",))):
        draw = key("rounding", seed, step, *words) & ~MASK32 | key("rounding", name) & MASK32
        expected = mix32((bits32(draw, numbers // 64) + numbers % 64 * 0x9E3779B1) & MASK32)
        for slot in slots:
            np.testing.assert_array_equal(random_bits(10_000, seed, step, slot, name), expected)
            noise = expected & 0x1FFF if slot == "momentum_buffer" else expected >> 19
            np.testing.assert_array_equal(
                random_bits(10_000, seed, step, slot, name, noise=True), noise
            )


def assert_independent(words, others, bits=32):
    """Each of the bits of two independent words agrees half the time, and as uniform numbers they
    do not correlate. Both bounds are 5 standard deviations of n pairs, passed by chance once in
    50,000 calls."""
    count = len(words)
    differing = words ^ others
    for bit in range(bits):
        share = ((differing >> np.uint32(bit)) & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(count), f"bit {bit}"
    assert abs(np.corrcoef(words, others)[0, 1]) < 5 / np.sqrt(count)


def test_draws_of_another_seed_step_slot_or_name_are_independent():
    for other in (
        {"seed": 1},
        {"step": 1},
        {"step": 1 << 16},
        {"slot": "mean"},
        {"name": "stem.bias"},
    ):
        assert_independent(random_bits(), random_bits(**other))
    # Each bit is set half the time: the upper bits of the numbers are all 0.
    assert_independent(random_bits(), np.arange(1 << 17, dtype=np.uint32))
    weight, momentum = (
        random_bits(slot=slot, noise=True) for slot in ("weight", "momentum_buffer")
    )
    for lag in (0, 1, 63, 64):  # of the same words
        assert_independent(weight[lag:], momentum[: len(momentum) - lag], 13)


def pairs(columns):
    """Correlations of all pairs of columns, [n, m], in standard deviations of those of independent
    columns."""
    columns = (columns - columns.mean(0)) / columns.std(0)
    return (columns.T @ columns / len(columns) ** 0.5)[np.triu_indices(columns.shape[1], 1)]


def at_lags(columns):
    """The same of each value with one some rows further on, over all columns together, for twelve
    distances."""
    columns = (columns - columns.mean()) / columns.std()
    lags = (1, 2, 3, 4, 8, 16, 32, 63, 64, 65, 128, 1024)
    return np.array(
        [np.vdot(columns[:-lag], columns[lag:]) / columns[lag:].size ** 0.5 for lag in lags]
    )


def assert_uncorrelated(found, count):
    """None of `count` correlations is beyond what one of so many independent ones is by chance once
    in 1,000 seeds (Bonferroni), and all together they are no larger than chance: the mean of their
    squares is 1 to 5 deviations."""
    assert len(found) == count
    assert np.abs(found).max() < NormalDist().inv_cdf(1 - 0.0005 / count)
    assert abs((found**2).mean() - 1) < 5 * (2 / count) ** 0.5


def test_no_two_elements_or_steps_of_one_correlate():
    """And one pair of elements that correlates by a tenth would be seen."""
    bits = RoundingBits({"stem.weight": (0, 256)}, 256, 0, CPU)
    words = [
        rounding.random_bits(bits.rows, bits.lanes, bits.draw(step, "weight")[0])
        for step in range(4000)
    ]
    words = torch.stack(words).flatten(1)
    for noise in (rounding.upper, rounding.lower):
        history = noise(words).numpy().astype(np.float64)
        assert_uncorrelated(pairs(history), 32_640)
        assert_uncorrelated(at_lags(history), 12)
    history[:, 200] += 0.11 * history[:, 3]
    with pytest.raises(AssertionError):
        assert_uncorrelated(pairs(history), 32_640)


def test_no_two_places_of_a_row_or_of_a_buffer_correlate():
    for slot in ("weight", "momentum_buffer"):
        noise = random_bits(1 << 18, slot=slot, noise=True).astype(np.float64)
        assert_uncorrelated(pairs(noise.reshape(-1, ROW)), 2016)
        assert_uncorrelated(at_lags(noise[:, None]), 12)


def test_updates_and_slots_round_with_words_of_their_own():
    """The same values round up in other places: weights and their momentum take the two halves of a
    word."""
    source = np.full(4 * ROW, 1.0 + 2.0**-12, np.float32)
    assert np.array_equal(rounded(source, step=3), rounded(source, step=3))
    results = [
        rounded(source, step=step, slot=slot)
        for step in (3, 4)
        for slot in ("weight", "momentum_buffer", "mean")
    ]
    for number, result in enumerate(results):
        assert all(np.any(result != other) for other in results[:number])


def test_a_draw_is_a_signed_number_of_32_bits():
    assert [rounding._signed(word) for word in (0, 2**31 - 1, 2**31, 2**32 - 1)] == [
        0,
        2**31 - 1,
        -(2**31),
        -1,
    ]


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_compiled_it_rounds_to_the_same_bits(monkeypatch, instructions):
    """With each width of vectors, and without the instructions that convert float16; NaN and
    infinity among them."""
    compile_for(monkeypatch, instructions)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e6, -1e6, 0.0, -0.0], np.float32)
    source = in_rows(np.concatenate([floats_of_all_kinds(), special]))
    bits = RoundingBits({"a": (0, len(source))}, len(source), 0, CPU)
    plain, found = torch.empty(2, len(source), dtype=torch.float16)
    run, note = compilation.compiled(layout.Buffers(source, found, found, {}), stochastic=True)
    assert "is compiled" in note
    for slot in ("weight", "momentum_buffer", "mean"):
        round_stochastically(source, bits, 3, slot, out=plain, keep=KEEP)
        round_stochastically(source, bits, 3, slot, out=found, keep=KEEP, run=run)
        assert torch.equal(found.isnan(), plain.isnan())
        assert torch.equal(
            found.nan_to_num().view(torch.int16), plain.nan_to_num().view(torch.int16)
        )


class OffCpu(torch.Tensor):
    """A tensor that says it lies on another device, so that the code for those runs here."""

    device = property(lambda self: SimpleNamespace(type="cuda"))


@pytest.mark.parametrize("kind", [torch.Tensor, OffCpu])
def test_every_device_computes_the_same_and_changes_no_bit_where_a_step_is_left_out(kind):
    """Not even NaNs, or zeros' signs, in the state; nor does the source's NaN reach it."""
    source = torch.from_numpy(floats_of_all_kinds()[:9_984])
    source[:3] = torch.tensor([np.nan, np.inf, -np.inf])
    bits = RoundingBits({"stem.weight": (0, 9_984)}, 9_984, 0, CPU)
    patterns = np.arange(9_984, dtype=np.uint16) * 8  # NaNs, infinities and both zeros among them
    out = torch.from_numpy(patterns.view(np.float16).copy())
    round_stochastically(source.as_subclass(kind), bits, 3, "weight", out=out, keep=LEAVE)
    np.testing.assert_array_equal(out.numpy().view(np.uint16), patterns)
    round_stochastically(source.as_subclass(kind), bits, 3, "weight", out=out, keep=KEEP)
    np.testing.assert_array_equal(
        out.numpy().view(np.uint16), rounded(source.numpy(), step=3).view(np.uint16)
    )


def test_nothing_waits_for_another_device():
    """On tensors without values, as those that a device has not computed yet, reading one
    raises."""
    with FakeTensorMode():
        gpu = torch.device("cuda")
        source = torch.zeros(ROW, device=gpu)
        out = torch.zeros(ROW, dtype=torch.float16, device=gpu)
        keep = torch.ones((), dtype=torch.bool, device=gpu)
        round_stochastically(
            source, RoundingBits({"a": (0, 50)}, ROW, 0, gpu), 0, "weight", out=out, keep=keep
        )
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(keep)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_rounds_as_the_cpu_does():
    source = in_rows(floats_of_all_kinds()).numpy()
    gpu = torch.device("cuda")
    length = len(source)
    out = torch.full((length,), 7.0, dtype=torch.float16, device=gpu)
    bits = RoundingBits({"stem.weight": (0, length)}, length, 0, gpu)
    round_stochastically(
        torch.from_numpy(source).to(gpu), bits, 3, "weight", out=out, keep=LEAVE.to(gpu)
    )
    assert (out == 7).all()
    round_stochastically(
        torch.from_numpy(source).to(gpu), bits, 3, "weight", out=out, keep=KEEP.to(gpu)
    )
    np.testing.assert_array_equal(
        out.cpu().numpy().view(np.uint16), rounded(source, step=3).view(np.uint16)
    )
