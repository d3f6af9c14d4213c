"""The section `exchange`: which keys go together, and what they mean step by step."""

import pytest

from recipe.checks import bound_to_cut
from recipe.idle import PREDICTED
from recipe.loading import load, loads
from tests.conftest import QUICKSTART


def recipe(overrides=""):
    return load(
        QUICKSTART, [f"exchange.{override}" for override in overrides.split()], used=PREDICTED
    )


def test_keys_that_only_say_how_another_method_sends_are_ignored():
    plain = recipe("density=0.01")
    text = f"{QUICKSTART.read_text()}\nexchange: {{density: 0.01, compress: update, wire: float16, dense_1d: false}}\n"
    assert loads(text, "a recipe that others extend") == plain


def test_a_section_becomes_that_of_another_method():
    own = recipe("method=topk dense_1d=true density=0.01 delay=2").exchange
    assert own.to("gtopk", pattern="butterfly").model_dump(include={"method", "dense_1d", "density", "pattern"}) == {
        "method": "gtopk", "dense_1d": True, "density": 0.01, "pattern": "butterfly",
    }  # fmt: skip
    assert own.refused_by("dense") == {"dense_1d": False} and own.refused_by("gtopk") == {}
    assert own.to("dense") == recipe("density=0.01 delay=2").exchange


def test_densities_and_dense_steps():
    """Dense first, then one density an epoch of 10 steps, then the recipe's.

    Without epochs: an engine at rest.
    """
    section = recipe("method=gtopk density_warmup=[0.25,0.05] dense_steps=3").exchange
    found = [section.density_at(step, 10) for step in (0, 2, 3, 9, 10, 19, 20, 1000)]
    assert found == [1, 1, 0.25, 0.25, 0.05, 0.05, 0.001, 0.001]
    assert recipe("method=topk").exchange.density_at(0, None) == 0.001
    local = recipe("method=local dense_steps=3 dense_epochs=0.5").exchange
    assert [local.is_dense(step, 10) for step in (0, 2, 4, 5)] == [True, True, True, False]
    assert [local.is_dense(step, None) for step in (2, 3)] == [True, False]
    assert section.counts_epochs and local.counts_epochs
    assert not recipe("method=topk").exchange.counts_epochs and not recipe().exchange.counts_epochs


@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        ("", 0.0),
        ("delay=3", 1.0),
        ("method=local delay=1", 1 / 8),
        ("method=local delay=1 fragments=4", 0.5),
        ("method=local delay=3 fragments=8", 1.0),
    ],
)
def test_a_late_exchange_runs_beside_steps(overrides, beside):
    assert recipe(overrides).exchange.beside == beside


@pytest.mark.parametrize(
    ("override", "compress"),
    [
        ("optimizer.name=lars", "update"),
        ("optimizer.name=sgd", "gradient"),
        ("exchange.delay=1", "gradient"),
    ],
)
def test_what_is_compressed_is_resolved(override, compress):
    assert load(QUICKSTART, ["exchange.method=topk", override]).exchange.compress == compress


@pytest.mark.parametrize(
    ("overrides", "replicas", "why"),
    [
        ("method=topk", 1, "topk selects within each stage"),
        ("bits=4", 1, "exchange.bits rounds blocks of a stage"),
        ("method=local bits=8", 1, "local takes means of parts of a stage"),
        ("method=local outer=nesterov fragments=4", 1, "local takes means of parts of a stage"),
        ("", 2, ""),
        ("", 3, "exchange.order fast adds 3 replicas' gradients as they lie in a stage"),
        ("order=tree", 3, ""),
        ("method=half", 3, ""),
        ("method=none", 3, ""),
    ],
)
def test_where_a_cut_would_change_what_is_learned(overrides, replicas, why):
    """What rounds or moves parts of a stage does so for a single replica, too."""
    assert bound_to_cut(recipe(overrides), replicas) == why
