"""The benchmark of the update: what its sides do, on a small model, and what its claims are made
of."""

import pytest
import torch
from torch import nn

from benchmarks import optimizer
from benchmarks.optimizer import CAST, COPY, OURS, ROUNDING, TIMM


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in (("a", (7, 5)), ("b", (3,)))
    }


@pytest.fixture
def state():
    return optimizer.weight_state(parameters(), torch.float16, torch.float16)


def test_claims_are_ratios_of_neighbouring_turns_and_bytes_of_what_persists(state):
    times = {
        OURS: [2.0, 6.0, 4.0],
        TIMM: [4.0, 6.0, 2.0],
        COPY: [1.0, 2.0, 1.0],
        ROUNDING: [3.0] * 3,
        CAST: [2.0] * 3,
    }
    made = {claim["name"]: claim for claim in optimizer.claims_of(times, state)}
    assert made["time_over_timm_lars"]["value"] == 1.0 and made["time_over_timm_lars"][
        "spread"
    ] == [0.5, 2.0]
    assert (made["time_over_copy_limit"]["value"], made["rounding_over_cast"]["value"]) == (
        3.0,
        1.5,
    )
    assert (
        made["state_bytes_per_parameter"]["value"] == 4
        and made["state_bytes_per_parameter"]["holds"]
    )


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    """One line and the code for wrong input: uncompiled there is nothing to claim."""
    from common.command import finish, one_line
    from optim.layout import in_parts

    monkeypatch.setattr("sys.argv", ["optimizer"])
    monkeypatch.setattr(optimizer, "b4_parameters", parameters)
    monkeypatch.setattr(
        "optim.weight_state.compiled",
        lambda *buffers: (in_parts, "the update runs uncompiled: none"),
    )
    monkeypatch.setattr(optimizer, "norm_parameters", lambda model: [])
    with pytest.raises(SystemExit) as ended:
        finish(one_line()(optimizer.main))
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "benchmarks.optimizer: the update runs uncompiled: none"
    ]
