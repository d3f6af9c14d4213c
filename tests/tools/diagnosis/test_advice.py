"""Which part is named first, and what is to be tried: every rule, on made-up figures."""

import pytest

from recipe import loading
from tests.conftest import QUICKSTART
from tools.diagnosis.advice import Figures, advise
from tools.diagnosis.splitting import PARTS

METHODS = {"dense": 0.4, "half": 0.21, "topk": 0.02, "gtopk butterfly": 0.012, "gtopk tree": 0.021}


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


def test_workers_that_would_keep_up_are_named():
    """Four workers that are waited for 38 % of the time are busy: 4 / (1 - 0.38) = 6.45 of them would keep up."""
    found = advise(figures(input=0.38))
    assert found == (
        "input",
        "Waiting for images takes 38 % of a step: data.workers=7 would keep up.",
        ["data.workers=7"],
    )


def test_a_worker_on_cores_that_compute_is_to_be_measured():
    found = advise(figures(input=0.1, workers=0, cores=2, threads=2))
    assert found.overrides == ["data.workers=1"]
    assert found.text.endswith("though the cores that they need compute as well: measure it.")


def test_more_workers_than_cores_need_smaller_files():
    found = advise(figures(input=0.5, cores=4))
    assert "8 workers would keep up, but a rank has 4 cores" in found.text and "--short-side" in found.text
    assert found.overrides == []


def test_on_a_gpu_it_can_decode():
    assert advise(figures(input=0.5, cores=4, device="cuda")).overrides == ["data.reader=dali"]
    drawn = advise(figures(input=0.5, cores=4, device="cuda", reading=None))
    assert drawn.overrides == [] and "data.augment" in drawn.text


def test_a_slow_disk_is_named():
    found = advise(figures(input=0.5, reading=0.8, cores=4))
    assert "80 % of an image's time is reading its bytes" in found.text and "tools.shards pack" in found.text
    assert found.overrides == ["data.workers=8"]


def test_a_slow_host_is_named():
    found = advise(figures(straggling=0.09, lag=0.2))
    assert found.limit == "straggling" and found.overrides == []
    assert "rank 1 on host b computes 20 % slower than the others" in found.text


def test_ranks_that_take_turns_at_being_slow_need_more_micro_batches():
    found = advise(figures(straggling=0.09))
    assert "now of one and now of another" in found.text
    assert found.overrides == ["batch.global=128"]  # twice 8 micro x 4 accumulation x 2 replicas


def test_a_slow_exchange_gives_way_to_the_one_that_auto_would_take():
    """Each that loses more is taken if it is 1.5 times as fast: half, topk, and of gtopk the butterfly."""
    found = advise(figures(exchange=0.4))
    assert found.limit == "exchange" and found.overrides == ["exchange.method=gtopk", "exchange.pattern=butterfly"]
    assert "40 % of a step over links of 1 Gbit/s" in found.text
    assert "takes 12 ms by itself in place of 400 ms" in found.text and "batch.global=128" in found.text


def test_keys_that_another_method_refuses_are_reset():
    reset = {"gtopk": ["exchange.order=fast"], "dense": ["exchange.order=fast", "exchange.dense_1d=false"]}
    assert advise(figures(exchange=0.4, reset=reset)).overrides[-1] == "exchange.order=fast"
    whole = advise(figures(exchange=0.4, method="topk", methods={"dense": 0.05, "topk": 0.2}, reset=reset))
    assert whole.overrides == ["exchange.method=dense", "exchange.order=fast", "exchange.dense_1d=false"]


@pytest.mark.parametrize("method", ["gtopk butterfly", "none"])
def test_where_no_other_exchange_is_faster_the_batch_grows(method):
    found = advise(figures(exchange=0.2, method=method))
    assert "no other method is worth a change" in found.text and "exchange.delay=1" in found.text
    assert found.overrides == ["batch.global=128"]


def test_late_gradients_are_not_asked_for_twice_nor_on_gpus():
    for changes in ({"delay": 1}, {"device": "cuda"}):
        assert "delay" not in advise(figures(exchange=0.2, method="gtopk butterfly", **changes)).text


def test_methods_that_were_not_measured_change_nothing():
    assert advise(figures(exchange=0.2, methods={}, bandwidth=None)).overrides == ["batch.global=128"]


def test_a_bubble_asks_for_more_micro_batches():
    """2 stages: (K - 1) / (M + K - 1) is 1 / 5 of 4 micro batches, 1 / 9 of 8."""
    found = advise(figures(bubble=0.25, stages=2))
    assert "4 micro batches on 2 stages leave 20 % at best" in found.text and "that 11 %" in found.text
    assert found.overrides == ["batch.micro=4"]


@pytest.mark.parametrize("changes", [{"micro": 3}, {"micro": 2}, {"micro": 1, "mixes": False}])
def test_micro_batches_that_cannot_be_halved_make_the_batch_grow(changes):
    found = advise(figures(bubble=0.25, stages=2, **changes))
    assert found.overrides == [f"batch.global={2 * changes['micro'] * 4 * 2}"]


def test_uneven_stages_are_cut_anew_or_fewer():
    assert advise(figures(imbalance=0.2, stages=4, split=True)).overrides == ["parallel.split=auto"]
    assert advise(figures(imbalance=0.2, stages=4)).overrides == ["parallel.stages=2"]


def test_a_slow_update_is_compiled_or_made_less_often():
    assert advise(figures(update=0.3)).overrides == ["engine.compile=true"]
    for changes in ({"compiled": True}, {"device": "cuda"}):
        found = advise(figures(update=0.3, **changes))
        assert found.overrides == ["batch.global=128"] and "compile" not in found.text


def test_nothing_but_computing_is_the_limit():
    found = advise(figures(exchange=0.049, update=0.02))
    assert found.limit == "compute" and "at 37 % of what large matrix products reach" in found.text
    assert found.overrides == ["batch.micro=16"]
    assert advise(figures(accumulation=3)).overrides == []


def test_of_equal_parts_the_one_whose_remedy_costs_least_is_named():
    tied = {name: 0.1 for name in PARTS if name not in ("compute", "rest")}
    order = []
    while tied:
        order.append(advise(figures(**tied)).limit)
        del tied[order[-1]]
    assert order == ["input", "straggling", "exchange", "bubble", "imbalance", "update"]


def test_a_single_process_has_nobody_to_wait_for():
    found = advise(figures(replicas=1, methods={}, bandwidth=None, slowest=None, lag=None, update=0.2))
    assert found.limit == "update" and "batch.global=64" in found.text


def test_what_is_in_no_part_is_said():
    assert "But" not in advise(figures(rest=0.1)).text
    text = advise(figures(rest=0.3)).text
    assert "But 30 % of the step is in none of its parts: workers that read take cores" in text
    text = advise(figures(rest=-0.2, workers=0)).text
    assert "But its parts overlap: the machine is busy" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"input": 0.4}, {"straggling": 0.2}, {"exchange": 0.4}, {"exchange": 0.2, "methods": {}}, {"bubble": 0.3},
        {"imbalance": 0.2, "split": True}, {"update": 0.3}, {"update": 0.3, "compiled": True}, {},
    ],
)  # fmt: skip
def test_every_override_is_one_that_a_recipe_takes(changes):
    overrides = advise(figures(stages=2 if "bubble" in changes else 1, **changes)).overrides
    assert overrides
    loading.load(QUICKSTART, overrides)
