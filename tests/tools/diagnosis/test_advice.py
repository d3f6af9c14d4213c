"""Which part is named first, and what is to be tried: every rule, on made-up figures."""

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, ROOT
from tools.diagnosis.advice import Figures, advise
from tools.diagnosis.splitting import PARTS

METHODS = {"dense": 0.4, "half": 0.21, "topk": 0.02, "gtopk butterfly": 0.012, "gtopk tree": 0.021}
# Overrides that reset keys which another method refuses, by method.
RESET = {"gtopk": ["exchange.order=fast"], "dense": ["exchange.order=fast", "exchange.dense_1d=false"]}
SINGLE = {"replicas": 1, "methods": {}, "bandwidth": None, "slowest": None, "lag": None}


def figures(**changes):
    """Two replicas of a step of one second, of which all but what is given is computing."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts.update({name: changes.pop(name) for name in PARTS if name in changes})
    parts["compute"] = 1.0 - sum(parts.values())
    given = {
        "device": "cpu", "cores": 8, "threads": 1, "replicas": 2, "stages": 1, "virtual": 1, "split": False,
        "mixes": True, "accumulation": 4, "micro": 8, "workers": 4, "reading": 0.1, "delay": 0, "compiled": False,
        "bandwidth": 125e6, "method": "dense", "methods": METHODS, "reset": {"topk": [], "gtopk": []}, "slowest": 1,
        "lag": 0.01, "host": "b", "mfu": 0.37,
    }  # fmt: skip
    return Figures(parts, **{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "limit", "words", "overrides"),
    [
        # Four workers that are waited for 38 % of the time are busy: 4 / (1 - 0.38) = 6.45 of them would keep up.
        ({"input": 0.38}, "input", ["takes 38 % of a step", "data.workers=7 would keep up"], ["data.workers=7"]),
        ({"input": 0.1, "workers": 0, "cores": 2, "threads": 2}, "input", ["compute as well"], ["data.workers=1"]),
        ({"input": 0.5, "cores": 4}, "input", ["8 workers", "a rank has 4 cores", "--short-side"], []),
        ({"input": 0.5, "cores": 4, "device": "cuda"}, "input", [], ["data.reader=dali"]),
        ({"input": 0.5, "cores": 4, "device": "cuda", "reading": None}, "input", ["data.augment"], []),
        ({"input": 0.5, "cores": 4, "reading": 0.8}, "input", ["80 % of", "tools.shards pack"], ["data.workers=8"]),
        ({"straggling": 0.09, "lag": 0.2}, "straggling", ["rank 1 on host b computes 20 % slower"], []),
        # Ranks that are slow in turn: twice 8 micro x 4 accumulation x 2 replicas.
        ({"straggling": 0.09}, "straggling", ["now of one and now of another"], ["batch.global=128"]),
        # Each that loses more is taken if it is 1.5 times as fast: half, topk, and of gtopk the butterfly.
        (
            {"exchange": 0.4},
            "exchange",
            ["40 % of a step over links of 1 Gbit/s", "12 ms by itself in place of 400 ms", "batch.global=128"],
            ["exchange.method=gtopk", "exchange.pattern=butterfly"],
        ),
        (
            {"exchange": 0.4, "reset": RESET},
            "exchange",
            [],
            ["exchange.method=gtopk", "exchange.pattern=butterfly", "exchange.order=fast"],
        ),
        (
            {"exchange": 0.4, "method": "topk", "methods": {"dense": 0.05, "topk": 0.2}, "reset": RESET},
            "exchange",
            [],
            ["exchange.method=dense", "exchange.order=fast", "exchange.dense_1d=false"],
        ),
        ({"exchange": 0.2, "method": "gtopk butterfly"}, "exchange", ["exchange.delay=1"], ["batch.global=128"]),
        ({"exchange": 0.2, "method": "none"}, "exchange", ["exchange.delay=1"], ["batch.global=128"]),
        ({"exchange": 0.2, "methods": {}, "bandwidth": None}, "exchange", [], ["batch.global=128"]),
        # 2 stages: (K - 1) / (M + K - 1) is 1 / 5 of 4 micro batches, 1 / 9 of 8.
        ({"bubble": 0.25, "stages": 2}, "bubble", ["leave 20 % at best", "that 11 %"], ["batch.micro=4"]),
        ({"bubble": 0.25, "stages": 2, "micro": 3}, "bubble", [], ["batch.global=48"]),
        ({"bubble": 0.25, "stages": 2, "micro": 2}, "bubble", [], ["batch.global=32"]),  # two images are mixed
        ({"bubble": 0.25, "stages": 2, "micro": 1, "mixes": False}, "bubble", [], ["batch.global=16"]),
        ({"imbalance": 0.2, "stages": 4, "split": True}, "imbalance", [], ["parallel.split=auto"]),
        ({"imbalance": 0.2, "stages": 4}, "imbalance", [], ["parallel.stages=2"]),
        ({"update": 0.3}, "update", ["compile"], ["engine.compile=true"]),
        ({"update": 0.2, **SINGLE}, "update", ["batch.global=64"], ["engine.compile=true"]),
        ({"exchange": 0.049, "update": 0.02}, "compute", ["at 37 % of what large matrix"], ["batch.micro=16"]),
        ({"accumulation": 3}, "compute", [], []),
    ],
)
def test_the_part_that_costs_most_has_a_remedy_that_a_recipe_takes(changes, limit, words, overrides):
    found = advise(figures(**changes))
    assert (found.limit, found.overrides) == (limit, overrides)
    assert [word for word in words if word not in found.text] == []
    reads_files = "data.reader=dali" in overrides
    config = ROOT / "configs" / "gpu.yaml" if reads_files else QUICKSTART
    loading.load(config, ["batch.micro=4", *overrides] if limit == "bubble" else overrides)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"exchange": 0.2, "method": "gtopk butterfly", "delay": 1}, "delay"),
        ({"exchange": 0.2, "method": "gtopk butterfly", "device": "cuda"}, "delay"),
        ({"update": 0.3, "compiled": True}, "compile"),
        ({"update": 0.3, "device": "cuda"}, "compile"),
        ({"rest": 0.1}, "But"),
    ],
)
def test_remedies_that_are_in_use_or_do_not_help_are_not_offered(changes, word):
    assert word not in advise(figures(**changes)).text


def test_of_equal_parts_the_one_whose_remedy_costs_least_is_named():
    tied = {name: 0.1 for name in PARTS if name not in ("compute", "rest")}
    order = []
    while tied:
        order.append(advise(figures(**tied)).limit)
        del tied[order[-1]]
    assert order == ["input", "straggling", "exchange", "bubble", "imbalance", "update"]


def test_a_rest_that_no_part_explains_is_reported():
    assert "But 30 % of the step is in none of its parts: workers that read" in advise(figures(rest=0.3)).text
    assert "But its parts overlap: the machine is busy" in advise(figures(rest=-0.2, workers=0)).text
