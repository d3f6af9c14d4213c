"""Our functions for CPUs against the same formulas in float64."""

import itertools
import math
import platform

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.cpp_compiler import CompilerError
from models.native import library
from models.native.library import GATED, LINEAR, PLAIN, POOLED, Norm
from tests.models.native.exact import (
    EPS,
    FLOAT32,
    Around,
    convolution_exact,
    convolution_results,
    drawn,
    errors,
    form_exact,
    form_results,
    geometry,
    operands,
)

FORMS = (PLAIN, LINEAR, POOLED, GATED)
# Images, height, width. The last is more than one strip of pixels of any number of channels.
SIZES = [
    (1, 1, 1),
    (2, 1, 7),
    (3, 2, 3),
    (1, 13, 17),
    (2, 33, 5),
    (5, 7, 7),
    (9, 3, 1),
    (40, 2, 2),
    (1, 70, 65),
]
# Images, height, width, channels. The first are computed line by line, some of them in blocks of
# lines; the last, four and more images of 256 pixels at most, side by side.
LINES = [
    (1, 1, 1, 16),
    (2, 2, 3, 48),
    (3, 7, 5, 16),
    (1, 33, 2, 48),
    (5, 13, 33, 16),
    (2, 17, 13, 112),
    (1, 70, 45, 16),
]
IMAGES = [(5, 1, 1, 96), (9, 7, 5, 48), (40, 3, 2, 16), (5, 13, 17, 48), (4, 1, 33, 16)]
# Kernel, stride, and padding as TensorFlow's: with stride 1 that is the same.
SETTINGS = [
    (3, 1, False),
    (5, 1, False),
    (7, 1, False),
    *itertools.product((3, 5, 7), (2,), (False, True)),
]
# Groups of the normalisations before and behind.
AROUND = [
    Around(0, 0),
    Around(0, 4),
    Around(1, 1),
    Around(4, 4),
    Around(4, 1),
    Around(0, 1),
    Around(1, 4),
]


def tolerance(terms):
    """Of a result that goes through some ten operations and a sum of so many float32 terms, in eps
    of its size.

    Each addition rounds the sum so far by up to eps / 2, in either direction: a random walk of eps
    / 6 times the root of the number of terms. This is three times as far.
    """
    return 8 + math.sqrt(terms) / 2


def assert_exact(actual, expected, terms, case):
    """`y` of a normalisation is a function of single numbers and of moments, whose sums are
    float64: 4 eps."""
    for name, error in errors(actual, expected).items():
        allowed = 4 if name == "y" and not terms else tolerance(terms or 0)
        assert error <= allowed, (
            f"{case}: {name} is off by {error:.1f} eps, {error / allowed:.2g} of what is allowed"
        )


def check_normalization(
    images, height, width, channels, groups, forms=FORMS, bias=True, around=True
):
    given = operands(images, height, width, channels=channels, bias=bias, around=around)
    for form in forms:
        actual = form_results(form, given, groups)
        expected = form_exact(form, given, groups)
        case = f"form {form}, {images} x {height} x {width} x {channels}, {groups} groups"
        y = [{"y": each.pop("y")} for each in (actual, expected) if "y" in each]
        if y:
            assert_exact(*y, 0, case)
        assert_exact(actual, expected, height * width, case)


def convolved(setting, shape, bias=True):
    """Operands before and behind a convolution, its weights and its numbers."""
    (images, height, width, channels), (kernel, stride, same) = shape, setting
    by = geometry(kernel, stride, same, height, width)
    given = operands(images, height, width, channels, bias)
    after = operands(images, by.out_height, by.out_width, channels, bias, seed=11)
    return given, after, drawn(channels, 16, kernel, kernel, seed=5) / (4 * kernel), by


def check_convolution(setting, shape, around, bias=True):
    operands_of_it = convolved(setting, shape, bias)
    actual = convolution_results(*operands_of_it, around)
    expected = convolution_exact(*operands_of_it, around)
    # Terms of outputs and of input gradients, or of the weights' gradients.
    terms = max(16 * setting[0] ** 2, shape[0] * shape[1] * shape[2])
    assert_exact(actual, expected, terms, f"{setting}, {shape}, {around}")


def assert_same(found, expected, names=None):
    for name in names or expected:
        assert torch.equal(found[name], expected[name]), name


# ---- Against float64.


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("channels", [8, 12, 16, 24, 40, 48, 80, 112, 1280])
def test_normalizations_and_their_gradients(channels, groups):
    """Plain, without SiLU, pooled and gated; each number of channels with half of the sizes, each
    size with half of the numbers of channels. Those with and without a bias; with images that
    stochastic depth drops and a residual."""
    first = (channels // 4 + groups) % 2
    sizes = [
        *SIZES[first:8:2],
        (1, 7, 7) if channels == 1280 else SIZES[8] if channels < 40 else (1, 70, 13),
    ]
    for number, size in enumerate(sizes):
        check_normalization(*size, channels, groups, bias=number % 2 == 0, around=number % 3 != 0)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_convolutions_and_their_gradients(setting):
    """Alone, and with each combination of normalisations before and behind."""
    for number, shape in enumerate([*LINES, *IMAGES]):
        check_convolution(setting, shape, AROUND[0])
        check_convolution(
            setting, shape, AROUND[1:][(number + setting[0]) % 6], bias=number % 3 != 0
        )


@pytest.mark.parametrize("pixels", [(70, 65), (13, 17), (1, 1)], ids=str)
@pytest.mark.parametrize(("mean", "std"), [(1e4, 1.0), (1e3, 1e-2), (-30.0, 1.0)])
@pytest.mark.parametrize("channels", [8, 40])
def test_large_means_take_no_digits_of_a_variance(channels, mean, std, pixels):
    """Against float64 of the same float32 input: the mean is rounded once; the root halves a
    variance's error.

    A difference of squares in float32 has no right digit of the first two variances, and two passes
    whose means are rounded lose two or three.
    """
    x = drawn(3, *pixels, channels, mean=mean, std=std)
    moments = library.group_moments(x, 4, 0.0).double()
    variances, means = torch.var_mean(x.double().unflatten(-1, (4, -1)), (1, 2, 4), correction=0)
    assert ((moments[..., 0] - means).abs() <= 0.501 * np.spacing(np.float32(abs(mean)))).all()
    error = (moments[..., 1] * variances.sqrt() - 1).abs().max()
    assert error <= tolerance(min(pixels[0] * pixels[1], 32768 // channels)) / 2 * FLOAT32


def test_moments_behind_a_convolution_are_those_of_its_output():
    """With a mean of 1,000 deviations, and by either way of convolving: float64 of the float32
    output."""
    for shape in (LINES[-1], IMAGES[3]):
        given, _, weight, by = convolved((3, 1, False), shape)
        given.x[..., ::16] = 1
        weight *= 1e-2
        weight[:, 0] = 0
        weight[:, 0, 1, 1] = 30
        y, moments = library.convolution(given.x, weight, by, before=None, groups=4, eps=0.0)
        variances, means = torch.var_mean(
            y.double().unflatten(-1, (4, -1)), (1, 2, 4), correction=0
        )
        assert (means > 1000 * variances.sqrt()).all()
        torch.testing.assert_close(moments[..., 0].double(), means, rtol=FLOAT32 / 2, atol=0)
        error = (moments[..., 1] * variances.sqrt() - 1).abs().max()
        assert error <= tolerance(shape[1] * shape[2]) / 2 * FLOAT32


@pytest.mark.parametrize("value", [0.0, 1 / 3, -7e5])
def test_constant_input_has_variance_0(value):
    """So eps alone decides, the output is the bias, and gradients are finite."""
    given = operands(3, 70, 65, 8)._replace(
        x=torch.full((3, 70, 65, 8), value), kept=None, residual=None
    )
    moments = library.group_moments(given.x, 4, EPS)
    assert (moments == torch.tensor([value, EPS**-0.5])).all()
    found = form_results(LINEAR, given, 4)
    assert torch.equal(found["y"], given.bias.expand(3, 70, 65, 8))
    assert_exact(found, form_exact(LINEAR, given, 4), 70 * 65, value)


def test_silu_and_its_slope_from_end_to_end():
    """Of 29 channels: vectors of 16 (8, 4), 8, 4 and 1. Moments of 0 and 1 leave z as it is.

    The exponential, the division and a product are off by 4 eps together; in the slope, of what is
    added, and by z times half an eps, by which a sigmoid near 1 is rounded. Below -88 the
    exponential ends; z times 6e-39 is left.
    """
    z = torch.linspace(-200, 200, 29 * 4001, dtype=torch.float64).float()
    ends = [0.0, -0.0, 1e-38, -1e-38, 88.0, -88.0, -87.0, -86.9, -88.8, -104.0, -1e4, 1e4, 3e38]
    z[: len(ends)] = torch.tensor(ends)
    x = z.view(1, 4001, 1, 29)
    norm = Norm(torch.tensor([[[0.0, 1.0]]]), torch.ones(29), None)
    silu = library.activated(x, norm, True).flatten().double()
    slope = torch.empty_like(x)
    library.gradient_sums(PLAIN, x, norm, torch.ones_like(x), dz=slope)
    slope = slope.flatten().double()
    z = z.double()
    gate = z.sigmoid()
    least = 1.2e-38 * (1 + z.abs().clamp(max=1e5))
    assert (silu - z * gate).abs().le(4 * FLOAT32 * (z * gate).abs() + least).all()
    summand = z * (1 - gate)
    size = 1 + summand.abs() + z.clamp(0, 20) / 8
    assert (slope - gate * (1 + summand)).abs().le(4 * FLOAT32 * gate * size + least).all()


@pytest.mark.parametrize("around", [Around(0, 0), Around(4, 4)])
def test_no_gradient_comes_of_none(around):
    """To the bit: where dy is 0, all gradients are. By either way of convolving."""
    for shape in (LINES[3], IMAGES[1]):
        given, after, weight, by = convolved((5, 2, True), shape)
        after = after._replace(
            dy=torch.zeros_like(after.dy), dpooled=torch.zeros_like(after.dpooled)
        )
        found = convolution_results(given, after, weight, by, around)
        assert not any(found[name].any() for name in found if name.startswith("d"))


# ---- NaN and infinity.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [LINES[5], IMAGES[1]], ids=str)
def test_what_is_not_finite_stays_in_its_image(shape, value):
    """All outputs of the image are then NaN, and its gradients; all bits of the others are as
    without it."""
    given, after, weight, by = convolved((3, 1, False), shape)
    around = Around(1, 1)

    def results(x):
        found = convolution_results(given._replace(x=x), after, weight, by, around)
        norm = Norm(library.group_moments(x, 1, EPS), given.weight, given.bias)
        found["activated"] = library.activated(x, norm, True, given.kept, given.residual)
        found["whole"], found["pooled"] = library.activated_and_pooled(x, norm)
        found["pooled alone"] = library.pooled(x, norm)
        library.multiply_(found["whole"], given.gate)
        return found

    x = given.x.clone()
    x[1, -1, 2, 3] = value
    found = results(x)
    clean = results(given.x)
    others = [image for image in range(shape[0]) if image != 1]
    for name in ("y", "moments", "dz", "dx", "activated", "whole", "pooled", "pooled alone"):
        assert torch.equal(found[name][others], clean[name][others]), name
        assert found[name][1].isnan().all(), name
        assert clean[name].isfinite().all(), name
    assert found["dweights"].isnan().all() and found["dweight"].isnan().all()


@pytest.mark.parametrize("shape", [LINES[5], IMAGES[1]], ids=str)
def test_a_gradient_that_is_not_finite_stays_in_its_image(shape):
    given, after, weight, by = convolved((5, 2, True), shape)
    clean = convolution_results(given, after, weight, by, Around(4, 4))
    after.dy[0, 0, 1, 2] = math.nan
    found = convolution_results(given, after, weight, by, Around(4, 4))
    assert_same(
        {name: found[name][1:] for name in ("dz", "dx")},
        {name: clean[name][1:] for name in ("dz", "dx")},
    )
    assert found["dx"][0].isnan().any() and found["dweights"].isnan().any()


@pytest.mark.parametrize("shape", [(2, 17, 19, 32), (5, 13, 11, 32)], ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 2), (7, 1)])
def test_an_infinite_pixel_reaches_what_its_kernel_reaches(kernel, stride, shape):
    """Not the other group of channels, or the pixels that are computed together with these."""
    given, _, weight, by = convolved((kernel, stride, False), shape)
    clean, _ = library.convolution(given.x, weight, by)
    given.x[1, 6, 4, 3] = math.inf
    found, _ = library.convolution(given.x, weight, by)
    ones = torch.zeros(shape).permute(0, 3, 1, 2)
    ones[1, 3, 6, 4] = 1
    reached = (
        F.conv2d(ones, torch.ones_like(weight), stride=stride, padding=kernel // 2, groups=2) > 0
    )
    reached = reached.permute(0, 2, 3, 1)
    assert torch.equal(found.isfinite(), ~reached)
    assert torch.equal(found[~reached], clean[~reached])


# ---- To the bit.


def all_results(shape, channels, setting, around):
    """Of all functions, by name."""
    given, after, weight, by = convolved(setting, (*shape, channels))
    found = {
        f"{form} {name}": each
        for form in FORMS
        for name, each in form_results(form, given, 4).items()
    }
    return {**found, **convolution_results(given, after, weight, by, around)}


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        pytest.param((3, 70, 45), 16, marks=pytest.mark.slow),
        ((9, 7, 5), 112),
        pytest.param((40, 3, 3), 48, marks=pytest.mark.slow),
        ((1, 1, 1), 16),
    ],
    ids=str,
)
def test_results_do_not_depend_on_the_number_of_threads(with_threads, shape, channels):
    """Both ways of convolving. More threads than there are tasks, too."""
    for setting, around in (((3, 1, False), Around(0, 0)), ((5, 2, True), Around(4, 4))):
        with_threads(
            lambda setting=setting, around=around: all_results(shape, channels, setting, around)
        )


def of_images(given, images):
    """The operands of some images."""
    kinds = {"x", "dy", "kept", "residual", "gate", "dpooled"}
    return given._replace(**{name: getattr(given, name)[images] for name in kinds})


@pytest.mark.parametrize(("height", "width"), [(5, 7), (16, 16), (17, 19), (2, 128)])
@pytest.mark.parametrize("setting", [(3, 1, False), (5, 2, True)], ids=str)
def test_an_image_does_not_depend_on_the_others_of_its_batch(setting, height, width):
    """Batches of 1, 3 and 9: of nine, small images are convolved side by side.

    Outputs and gradients of the image.

    Not of small images of 128 and more lines, which one at a time are more than one block: sums
    then differ by an eps.
    """
    given, after, weight, by = convolved(setting, (9, height, width, 32))
    whole = convolution_results(given, after, weight, by, Around(4, 4))
    forms = {form: form_results(form, given, 4) for form in FORMS}
    for images in (slice(4, 5), slice(3, 6)):
        part = of_images(given, images)
        found = convolution_results(part, of_images(after, images), weight, by, Around(4, 4))
        assert_same(found, {name: whole[name][images] for name in ("y", "moments", "dz", "dx")})
        for form in FORMS:
            names = {"y", "dx", "pooled", "dgate"} & forms[form].keys()
            assert_same(
                form_results(form, part, 4), {name: forms[form][name][images] for name in names}
            )


def test_inputs_stay_as_they_are():
    given, after, weight, by = convolved((3, 2, True), (5, 7, 9, 16))
    tensors = [*given, *after, weight]
    before = [each.clone() for each in tensors]
    all_results((5, 7, 9), 16, (3, 2, True), Around(4, 4))
    convolution_results(given, after, weight, by, Around(4, 4))
    for form in FORMS:
        form_results(form, given, 4)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before))


def test_a_gradient_may_be_written_in_the_place_of_the_one_it_is_made_of():
    given = operands(3, 7, 5, 24)
    norm = Norm(library.group_moments(given.x, 4, EPS), given.weight, given.bias)
    *_, by_group = library.merged_gradients(
        LINEAR, given.x, norm, library.gradient_sums(LINEAR, given.x, norm, given.dy)
    )
    expected = library.input_gradient(LINEAR, given.x, norm, by_group, given.dy)
    assert (
        library.input_gradient(LINEAR, given.x, norm, by_group, given.dy, out=given.dy) is given.dy
    )
    assert torch.equal(given.dy, expected)


# ---- Other processors, and what is refused.


@pytest.mark.parametrize(
    "instructions", ["x86-64-v3", pytest.param("x86-64", marks=pytest.mark.slow)]
)
def test_narrower_vectors_compute_the_same(monkeypatch, instructions):
    """AVX2 with 8 floats, and SSE2 with 4 and without FMA; a processor without AVX2 skips the
    first."""
    if platform.machine() != "x86_64":
        pytest.skip("of x86-64")
    if instructions == "x86-64-v3" and not torch.backends.cpu.get_cpu_capability().startswith(
        "AVX"
    ):
        pytest.skip("no AVX2 here")
    flags = tuple(
        f"-march={instructions}" if flag.startswith("-march") else flag for flag in library._FLAGS
    )
    native = library._library()
    monkeypatch.setattr(library, "_FLAGS", flags)
    library._library.cache_clear()
    try:
        assert library.fault() == "" and library._library() is not native
        for channels, groups in ((8, 1), (12, 4), (40, 4), (1280, 1)):
            check_normalization(3, 5, 7, channels, groups)
        check_normalization(1, 70, 65, 8, 4)
        for number, setting in enumerate(SETTINGS):
            for shape in (LINES[number % 7], LINES[6], IMAGES[number % 5]):
                check_convolution(setting, shape, AROUND[(number + shape[0]) % 7])
        test_silu_and_its_slope_from_end_to_end()
    finally:
        library._library.cache_clear()


def test_a_fault_is_one_line(monkeypatch):
    def failing():
        raise CompilerError("library.cpp:3: error: no\nand more")

    monkeypatch.setattr(library, "_library", failing)
    assert library.fault() == "library.cpp:3: error: no"


def test_other_dtypes_and_layouts_are_refused():
    """An address says nothing of them.

    Nor is there a function for a normalisation before a convolution only.
    """
    x = drawn(2, 3, 4, 16)
    for other in (x.double(), x.half(), x.transpose(1, 2), x[..., ::2]):
        with pytest.raises(AssertionError, match=r"^torch\.float"):
            library.group_moments(other, 1, EPS)
    given, after, weight, by = convolved((3, 1, False), (2, 3, 4, 16))
    with pytest.raises(AssertionError, match="there is one behind it"):
        convolution_results(given, after, weight, by, Around(4, 0))
