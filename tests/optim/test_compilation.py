"""Compiled passes against those of plain torch; without a compiler the update runs uncompiled, and
a line says why."""

import shutil
from pathlib import Path

import pytest
import torch

from optim import compilation, layout
from optim.lars_update import StepConstants, StepRows, SumConstants, SumRows, step_rows, sum_rows
from optim.layout import ROW
from optim.rounding import RoundingBits
from tests.optim.states import BRAIN, FORMS, HALF, INSTRUCTIONS, SINGLE, compile_for


def note_of(monkeypatch, compiler):
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(compilation, "library", compilation.library.__wrapped__)
    rows = torch.zeros(4)
    _, note = compilation.compiled(layout.Buffers(rows, rows, rows, {}), stochastic=True)
    return note


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"printf 'fault: \\377\\033[1m\\n'; exit 3", "fault: \ufffd\\x1b[1m"),
        (b"exit 0", "update.so"),
        (b'for last; do :; done; cp %s "$last"', "made a library without lars_sums"),
    ],
)
def test_a_compiler_that_fails_or_makes_no_library_of_ours_is_named_in_a_line(
    monkeypatch, tmp_path, text, words
):
    other = bytes(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so")
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\n" + text.replace(b"%s", other))
    compiler.chmod(0o755)
    note = note_of(monkeypatch, compiler)
    assert note.startswith("engine.compile: the update runs uncompiled: ") and words in note, note


def test_a_compiler_that_cannot_be_named_is_quoted(monkeypatch):
    assert "uncompiled: CXX=g++ ': No closing quotation" in note_of(monkeypatch, "g++ '")


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_the_line_of_an_update_that_is_compiled_says_how_long_it_took(monkeypatch):
    assert note_of(monkeypatch, "c++").startswith("the update is compiled: ready after ")


# The passes.

COUNT = 300  # rows
compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
every_form = pytest.mark.parametrize("form", FORMS)


def gradients():
    """Of many sizes, up to those that make a step overflow; NaN and infinity in the first row."""
    generator = torch.Generator().manual_seed(0)
    values = (
        torch.randn(COUNT, ROW, generator=generator)
        * 10.0 ** torch.linspace(-12, 8, COUNT)[:, None]
    )
    values[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    return values


def state(seed, dtype):
    """Every finite float16 number, about, or float32 numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == SINGLE:
        return (
            torch.randn(COUNT, ROW, generator=generator)
            * 10.0 ** torch.linspace(-9, 4, COUNT)[:, None]
        )
    patterns = torch.randint(-(2**15), 2**15, (COUNT, ROW), generator=generator, dtype=torch.int16)
    return patterns.view(HALF).nan_to_num(nan=0.5, posinf=1.5, neginf=-1.5)


def by_row(seed, smallest, largest):
    exponents = torch.linspace(smallest, largest, COUNT)
    return (2.0 ** exponents[torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed))])[
        :, None
    ]


def compiled_run(weight, working):
    run, note = compilation.compiled(layout.Buffers(weight, weight, working, {}), stochastic=True)
    assert "is compiled" in note
    return run


def assert_same_bits(found, expected):
    """NaN in the same places; of the others all bits, the signs of zeros among them."""
    wrong = expected.isnan()
    assert torch.equal(found.isnan(), wrong)
    integers = torch.int32 if expected.dtype == SINGLE else torch.int16
    assert torch.equal(found.view(integers)[~wrong], expected.view(integers)[~wrong])


@compiler
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("working", [None, SINGLE, BRAIN], ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@every_form
def test_a_compiled_step_rounds_and_writes_the_same_bits(
    monkeypatch, form, dtype, working, instructions
):
    """Given one rate for each row a step is the same operations of float32: its results, rounded
    inline, agree to the bit. Sums of squares are added in another order: they agree to a few
    roundings of 64 numbers. The second form has 1 - mu as well, which C++ computes in float32: a mu
    that float32 holds, so that both have the same."""
    compile_for(monkeypatch, instructions)
    bits = RoundingBits({"a": (0, COUNT * ROW)}, COUNT * ROW, 0, torch.device("cpu"))
    rounds = dtype == HALF
    constants = StepConstants(
        by_momentum=form == "momentum",
        nesterov=form == "nesterov",
        scale=torch.tensor(0.37),
        mu=0.875 if form == "momentum" else 0.885,
        lanes=bits.lanes if rounds else None,
        draw=bits.draw(7, "weight")[0] if rounds else 0,
        keep=None,
    )
    results = []
    for compile in (False, True):
        copies = None if working is None else torch.zeros(COUNT, ROW, dtype=working)
        rows = StepRows(
            gradient=gradients(),
            weight=state(1, dtype),
            momentum=state(2, dtype),
            working=copies,
            rate=by_row(3, -24, 3),
            decay=by_row(4, -20, 1),
            bits=bits.rows if rounds else None,
        )
        run = (
            compiled_run(rows.weight, rows.weight if copies is None else copies)
            if compile
            else layout.in_parts
        )
        results.append((rows, run(step_rows, rows, constants)))
    (plain, sums), (found, found_sums) = results
    assert_same_bits(found.weight, plain.weight)
    assert_same_bits(found.momentum, plain.momentum)
    if working is not None:
        assert_same_bits(found.working, plain.working)
    torch.testing.assert_close(found_sums, sums, rtol=64 * 2.0**-24, atol=0, equal_nan=True)
    moved = (plain.weight != state(1, dtype)).double().mean()
    assert moved > 0.3, "a step can be seen"


@compiler
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("by_momentum", [False, True])
def test_compiled_sums_are_those_of_plain_torch(dtype, by_momentum):
    """In another order: to a few roundings of 64 numbers, none of which is negative."""
    momentum, decay = (state(2, dtype), by_row(4, -20, 1)) if by_momentum else (None, None)
    rows = SumRows(gradients(), state(1, dtype), momentum, decay)
    constants = SumConstants(torch.tensor(0.37), 0.885)
    expected = layout.in_parts(sum_rows, rows, constants)
    found = compiled_run(rows.weight, rows.weight)(sum_rows, rows, constants)
    assert len(found) == len(expected) == 3 + by_momentum
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=64 * 2.0**-24, atol=0, equal_nan=True)
