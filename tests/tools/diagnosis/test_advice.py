"""Which part is named first, and what is to be tried: every rule, on made-up figures."""

from types import SimpleNamespace

import pytest

from engines.choice import Candidate
from parallel import exchange
from parallel.evidence import Evidence
from recipe import loading
from recipe.batch import divide
from recipe.exchange import Exchange
from tests.conftest import QUICKSTART, ROOT
from tools.diagnosis.advice import advise
from tools.diagnosis.links import Method
from tools.diagnosis.splitting import PARTS, Rank, spread

GPU = {"device": "an H100", "reading": 0.1}
LITTLE = Evidence(0.3, 0.2)
MUCH = Evidence(3.0, 0.2)


def method(name, seconds, evidence=LITTLE, **keys):
    chosen = exchange.of(Exchange(method=name, **keys))
    return Method(Candidate(chosen, seconds, 0.0, evidence=evidence), None)


DENSE = method("dense", 0.4, Evidence(0.0, 0.0))
HALF = method("half", 0.21)
TOPK = method("topk", 0.02)
METHODS = (DENSE, HALF, TOPK, method("gtopk", 0.012, pattern="butterfly"))
UNSURE = (DENSE, method("half", 0.21, None), method("topk", 0.02, MUCH))
LOCAL = method("local", 0.01, bits=4)
LOCAL_KEYS = ["exchange.method=local", "exchange.bits=4"]
BUTTERFLY = ["exchange.method=gtopk", "exchange.pattern=butterfly"]
TWICE = ["batch.global=128"]  # 2 x 8 micro x 4 accumulation x 2 replicas


def advised(
    *overrides, lag=0.01, device="cpu", cores=8, reading=0.1, methods=METHODS, links=True, **parts
):
    """Two replicas of a step of one second, of which all but what is given is computing; 4 micro
    batches of 8."""
    size = ["batch.micro=8", "batch.global=64", "parallel.replicas=2", "data.workers=4"]
    recipe = loading.load(QUICKSTART, [*size, *overrides])
    found = SimpleNamespace(
        batch=divide(recipe),
        parts={**dict.fromkeys(PARTS, 0.0), **parts},
        step=1.0,
        mfu=0.37,
        methods=methods,
        about={"device": device, "cores": cores},
        hosts=["b"],
        reading=SimpleNamespace(share_of_bytes=reading),
        links=links and SimpleNamespace(bandwidth=spread([125e6])),
        ranks=[Rank(1, 1, 0, host="b", mean=1.0, deviation=0.0, lag=lag)],
    )
    return advise(recipe, found)


@pytest.mark.parametrize(
    ("changes", "recipe", "limit", "words", "overrides"),
    [
        # Four workers that are waited for 38 % of the time are busy: 4 / (1 - 0.38) = 6.45 of them
        # would keep up.
        (
            {"input": 0.38},
            [],
            "input",
            ["takes 38 % of a step", "data.workers=7 would"],
            ["data.workers=7"],
        ),
        (
            {"input": 0.5, "cores": 4},
            [],
            "input",
            ["8 workers", "a rank has 4 cores", "--short-side"],
            [],
        ),
        ({"input": 0.5, "cores": 4, **GPU}, [], "input", [], ["data.reader=dali"]),
        ({"input": 0.5, "cores": 4, "reading": None}, [], "input", ["data.augment"], []),
        (
            {"input": 0.5, "cores": 4, "reading": 0.8},
            [],
            "input",
            ["80 % of", "tools.shards pack"],
            ["data.workers=8"],
        ),
        (
            {"straggling": 0.09, "lag": 0.2},
            [],
            "straggling",
            ["rank 1 on host b computes 20 % slower"],
            [],
        ),
        ({"straggling": 0.09}, [], "straggling", ["now of one and now of another"], TWICE),
        # Each that loses more is taken if it is 1.5 times as fast: half, topk, and then the
        # butterfly.
        (
            {"exchange": 0.4},
            [],
            "exchange",
            ["links of 1 Gbit/s", "12 ms by itself in place of 400 ms"],
            BUTTERFLY,
        ),
        (
            {"exchange": 0.4},
            ["exchange.order=tree"],
            "exchange",
            [],
            [*BUTTERFLY, "exchange.order=fast"],
        ),
        ({"exchange": 0.2}, BUTTERFLY, "exchange", ["exchange.delay=1"], TWICE),
        # What was not measured to keep accuracy is not proposed.
        ({"exchange": 0.2, "methods": UNSURE}, [], "exchange", ["no other method"], TWICE),
        (
            {"exchange": 0.2, "methods": [*UNSURE, LOCAL]},
            [],
            "exchange",
            ["loses 0.3 ± 0.2 points of"],
            LOCAL_KEYS,
        ),
        ({"exchange": 0.2, "methods": [], "links": None}, [], "exchange", [], TWICE),
        # 2 stages: (K - 1) / (M + K - 1) is 1 / 5 of 4 micro batches, 1 / 9 of 8.
        (
            {"bubble": 0.25},
            ["parallel.stages=2"],
            "bubble",
            ["leave 20 % at best", "that 11 %"],
            ["batch.micro=4"],
        ),
        ({"bubble": 0.25}, ["batch.micro=3", "batch.global=24"], "bubble", [], ["batch.global=48"]),
        # two are mixed
        ({"bubble": 0.25}, ["batch.micro=2", "batch.global=16"], "bubble", [], ["batch.global=32"]),
        ({"bubble": 0.25}, ["batch.micro=2", "data.mixup=0"], "bubble", [], ["batch.micro=1"]),
        (
            {"imbalance": 0.2},
            ["parallel.stages=4", "parallel.split=counted"],
            "imbalance",
            [],
            ["parallel.split=auto"],
        ),
        ({"imbalance": 0.2}, ["parallel.stages=4"], "imbalance", [], ["parallel.stages=2"]),
        (
            {"update": 0.3, "lag": None},
            [],
            "update",
            ["compile", "batch.global=128"],
            ["engine.compile=true"],
        ),
        (
            {"exchange": 0.049, "update": 0.02},
            [],
            "compute",
            ["at 37 % of what large matrix"],
            ["batch.micro=16"],
        ),
        ({}, ["batch.global=48"], "compute", [], []),
    ],
)
def test_the_part_that_costs_most_has_a_remedy_that_a_recipe_takes(
    changes, recipe, limit, words, overrides
):
    found = advised(*recipe, **changes)
    assert (found.limit, found.overrides) == (limit, overrides)
    assert [word for word in words if word not in found.text] == []
    config = ROOT / "configs" / "gpu.yaml" if "data.reader=dali" in overrides else QUICKSTART
    loading.load(config, [*recipe, *overrides])


def test_remedies_that_are_in_use_or_do_not_help_are_not_offered():
    assert "delay" not in advised(*BUTTERFLY, "exchange.delay=1", exchange=0.2).text
    assert "delay" not in advised(*BUTTERFLY, exchange=0.2, device="an H100").text
    assert "compile" not in advised("engine.compile=true", update=0.3).text
    assert "compile" not in advised(update=0.3, device="an H100").text


def test_of_equal_parts_the_one_whose_remedy_costs_least_is_named():
    tied = {name: 0.1 for name in PARTS if name not in ("compute", "rest")}
    assert advised(**tied).limit == "input"
    del tied["input"]
    assert advised(**tied).limit == "straggling"
