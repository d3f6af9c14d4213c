"""The benchmark of the update: what its sides do, on a small model, and what its claims are made of."""

import pytest
import torch
from torch import nn

from benchmarks import claims, optimizer
from benchmarks.optimizer import found, rows, saved_bytes, their_updates

OURS, THEIRS, COPY = "LARS, float16 state, compiled", "timm Lars, float32", "copy of 12 bytes a parameter"
ROUNDING, CAST = "stochastic rounding, compiled", "cast to float16, compiled"


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in (("a", (7, 5)), ("b", (3,)))}


@pytest.fixture
def state():
    return optimizer._weight_state(parameters(), torch.float16, torch.float16, compile=False)


def test_b4_has_its_parameters():
    assert sum(parameter.numel() for parameter in optimizer.b4_parameters().values()) == 19_328_168


def test_an_update_steps_and_leaves_the_parameters_that_it_was_made_of(state):
    before = state.flat.clone()
    finite, _ = state.update(0, 0.1, torch.tensor(128.0), False)
    assert finite and not torch.equal(state.flat, before)


def test_the_libraries_step_too():
    own = parameters()
    values = {name: parameter.detach().clone() for name, parameter in own.items()}
    for side in their_updates(own).values():
        kept = side.__defaults__[0].param_groups[0]["params"]
        side(0)
        assert not any(torch.equal(new, old) for new, old in zip(kept, values.values()))
    assert all(torch.equal(own[name], values[name]) for name in own)


def test_what_persists_takes_four_bytes(state):
    assert saved_bytes(state) == 4


def test_claims_are_ratios_of_neighbouring_turns(state):
    times = {
        OURS: [2.0, 6.0, 4.0],
        THEIRS: [4.0, 6.0, 2.0],
        COPY: [1.0, 2.0, 1.0],
        ROUNDING: [3.0] * 3,
        CAST: [2.0] * 3,
    }
    made = {claim["name"]: claim for claim in found(times, state)}
    assert made["time_over_timm_lars"]["value"] == 1.0 and made["time_over_timm_lars"]["spread"] == [0.5, 2.0]
    assert made["time_over_copy_limit"]["value"] == 3.0
    assert made["rounding_over_cast"]["value"] == 1.5
    assert made["state_bytes_per_parameter"]["holds"]


def test_sides_take_turns_in_alternating_order_and_the_first_turn_does_not_count():
    order = []
    sides = {name: lambda turn, name=name: order.append((name, turn)) for name in "ab"}
    times = claims.in_turn(sides, 2)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [len(each) for each in times.values()] == [2, 2]
    assert [row["what"] for row in rows(times, 10)] == ["a", "b"]


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    """One line and the code for wrong input: uncompiled there is nothing to claim."""
    from optim.layout import in_parts
    from training.command import finish, one_line

    monkeypatch.setattr("sys.argv", ["optimizer"])
    monkeypatch.setattr(optimizer, "b4_parameters", parameters)
    monkeypatch.setattr("optim.half_weights.compiled", lambda dry_pass: (in_parts, "the update runs uncompiled: none"))
    monkeypatch.setattr(optimizer, "norm_parameters", lambda model: [])
    with pytest.raises(SystemExit) as ended:
        finish(one_line()(optimizer.main))
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["benchmarks.optimizer: the update runs uncompiled: none"]
