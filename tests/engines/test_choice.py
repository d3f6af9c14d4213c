"""exchange.method auto: the method that suits links and model, the same on all ranks, and for all
of a run."""

import functools

import pytest
import torch

from common.errors import ConfigError
from engines import choice
from parallel import evidence, exchange, probe
from parallel.costs import Link
from parallel.evidence import Evidence
from parallel.exchange import Gradient
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide
from recipe.exchange import Auto, Exchange
from tests import ranks
from tests.engines import threads

SLOW = Link(2e-4, 4e-6)
FAST = Link(1e-4, 1e-12)
SELECTION = 0.004
ROUNDING = 0.001
CPU = torch.device("cpu")
# Of so small a model the sketches would be longer than all else; and what was not measured may be
# taken.
ANY = "exchange.accept_loss=100"
GRADIENT = ("exchange.compress=gradient", ANY)


@pytest.fixture
def resolved(tiny, monkeypatch):
    """resolved(link, *overrides): the section that auto becomes on all ranks, and the lines that
    are reported.

    link: of all ranks, or a function of the rank. measured: what is known of losses, by default
    nothing.
    """

    def resolve(link, *overrides, replicas=8, stages=1, begun=None, measured=()):
        for module in (evidence, exchange):
            monkeypatch.setattr(module, "MEASURED", measured)
        monkeypatch.setattr(
            probe, "measure", lambda *_: link(threads.rank()) if callable(link) else link
        )
        monkeypatch.setattr(choice, "timed", lambda work, device, calls: [SELECTION])
        recipe = tiny(
            "exchange.method=auto", "run.device=cpu", "batch.micro=2", "batch.global=48", *overrides
        )

        def choose(processes):
            lines = []
            return choice.settle(
                recipe, divide(recipe, replicas), processes, lines.append, begun
            ), lines

        # Ranks that find the same links compute the same: two of them are enough to agree.
        size = replicas * stages
        found = threads.run(size, stages, choose, present=size if callable(link) else min(2, size))
        assert found == [found[0]] * len(found)
        chosen, lines = found[0]
        assert loading.loads(loading.dump(chosen), "what was written") == chosen
        return chosen.exchange, lines

    return resolve


def test_methods_are_weighed_in_one_order_whichever_was_imported_first(monkeypatch):
    """A program of one's own may import one of their files, or register a method, before `auto`
    asks."""
    section = Exchange(method="auto")
    expected = [method.name for method in exchange.variants(section)]
    assert expected[0] == "dense" and expected.index("half") < expected.index(
        "topk"
    ) < expected.index("gtopk owners")
    candidates = [method.section.label for method in exchange.candidates(section)]

    half = exchange.named("half")

    class Own(exchange.Method):
        @classmethod
        def variants(cls, section):
            return [half]

    registered = dict(
        sorted(exchange.METHODS.items(), key=lambda item: item[1].__module__, reverse=True)
    )
    assert next(iter(registered.values())).__module__ == "parallel.topk"
    monkeypatch.setattr(exchange.METHODS, "_implementations", registered)
    assert [method.name for method in exchange.variants(section)] == expected
    assert [method.section.label for method in exchange.candidates(section)] == candidates
    monkeypatch.setattr(exchange.METHODS, "_implementations", {Auto: Own, **registered})
    assert [method.name for method in exchange.variants(section)] == [*expected, "half"]


def test_slow_links_get_gtopk_and_fast_ones_dense(resolved):
    section, lines = resolved(SLOW, *GRADIENT)
    assert (section.method, section.pattern) == ("gtopk", "owners")
    assert lines[0].endswith(" 8 replicas; links: latency 0.2 ms, bandwidth 2 Mbit/s")
    assert lines[1].startswith("  dense  ") and lines[1].endswith("; exact")
    assert lines[-2].startswith("  taken: gtopk owners 0.001; ") and max(map(len, lines)) <= 120
    section, lines = resolved(FAST)
    assert section.method == "dense"
    assert any(line.startswith("  half ") for line in lines)
    assert not any(
        line.startswith("  half ") for line in resolved(SLOW, "exchange.wire=float32")[1]
    )


def test_predictions_are_of_the_network_and_of_the_processor(tiny):
    """The former by the formulae of tests/parallel/test_costs.py."""
    recipe = tiny("exchange.method=auto", "batch.micro=3")
    link = Link(1e-3, 1e-6)
    gradient = Gradient(10**6)
    methods = exchange.candidates(recipe.exchange)
    work = {"selection": SELECTION, "rounding": ROUNDING}
    found = choice.predict(methods, recipe, divide(recipe, 4), gradient, link, **work)
    work = {
        each.method.section.label: each.seconds - each.method.seconds(link, 4, gradient)
        for each in found
    }
    expected = {
        "dense": 0.0,
        "half": ROUNDING,
        "topk 0.001": SELECTION,
        "gtopk tree 0.001": SELECTION,
    }
    assert {name: work[name] for name in expected} == pytest.approx(expected)
    assert next(each.size for each in found if each.name == "half") == 3e6


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ((15, 10.1, 10.1, 10.1, 10.1), "dense"),
        ((15, 10, 7, 7, 7), "half"),
        ((15, 11, 10, 6.6, 6, 6), "gtopk owners"),
        ((15, 10, 20, 20, 6.7, 4.4), "gtopk tree"),
        ((9e-3, 1e-3), "dense"),
    ],
)
def test_more_is_lost_only_for_half_as_much_speed_again_and_not_for_milliseconds(times, taken):
    names = ("dense", "half", "topk", "gtopk owners", "gtopk butterfly", "gtopk tree")
    candidates = [
        choice.Candidate(exchange.named(name), network, 0.0) for name, network in zip(names, times)
    ]
    assert choice.pick(candidates)[0].name == taken


KNOWN = (
    (Exchange(method="topk", density=0.05), Evidence(0.4, 0.1)),
    (Exchange(method="gtopk", density=0.02), Evidence(2.5, 0.3)),
)


@pytest.mark.parametrize(
    ("measured", "overrides", "taken"),
    [
        (KNOWN, (), "topk 0.05"),
        (KNOWN, ("exchange.accept_loss=3",), "gtopk tree 0.02"),
        (KNOWN, ("exchange.accept_loss=0.1",), "dense"),
        (KNOWN, ("exchange.density_warmup=[0.25]",), "topk 0.05"),
        (KNOWN, ("exchange.delay=1", "exchange.compress=gradient"), "dense"),
        (KNOWN, ("optimizer.name=sgd", "optimizer.trust=null"), "dense"),
        (evidence.MEASURED, ("exchange.accept_loss=0.5",), "dense, 4 bits"),
        (evidence.MEASURED, ("exchange.accept_loss=0.1",), "dense"),
        (evidence.MEASURED, ("exchange.accept_loss=0",), "dense"),
    ],
)
def test_what_was_measured_to_lose_more_than_is_accepted_is_not_taken(
    resolved, measured, overrides, taken
):
    """Of others than these nothing is known."""
    section, lines = resolved(SLOW, *overrides, measured=measured)
    assert section.label == taken
    assert f"  taken: {taken}; " in "\n".join(lines)
    assert any(line.endswith(f"; {measured[0][1]}") for line in lines) or measured is KNOWN


@pytest.mark.parametrize("delay", [7, 8, 64])
def test_means_of_weights_that_would_be_later_than_the_next_are_no_candidates(
    resolved, tiny, delay
):
    """Local takes a mean every 8 updates here.

    So it is where a recipe names another method, and the doctor advises.
    """
    section, lines = resolved(SLOW, f"exchange.delay={delay}", measured=evidence.MEASURED)
    assert (section.method, section.delay) == ("dense", delay)
    assert any(line.startswith("  local 8 ") for line in lines) == (delay < 8)
    named = tiny("exchange.method=dense", f"exchange.delay={delay}", "batch.micro=3")
    (local,) = [
        each for each in exchange.candidates(named.exchange) if each.section.label == "local 8"
    ]
    found = choice.predict([local], named, divide(named, 2), Gradient(10**6), SLOW)
    assert len(found) == (delay < 8)
    if not found:
        with pytest.raises(
            ConfigError, match=r"exchange\.method local: .*; use a delay below local_steps 8"
        ):
            local.overrides(named.exchange)


def test_keys_of_topk_are_left_out_with_dense(resolved):
    keys = (
        "exchange.density_warmup=[0.25]",
        "exchange.dense_1d=true",
        "exchange.density=0.01",
        ANY,
    )
    section, lines = resolved(FAST, *keys)
    assert section == Exchange(method="dense", density=0.01)
    assert lines[-1].startswith("exchange.density_warmup, dense_1d: left out")
    section, lines = resolved(SLOW, *keys)
    assert (section.method, section.density_warmup, section.dense_1d) == ("gtopk", [0.25], True)


def test_where_there_is_no_choice(resolved, tiny):
    section, lines = resolved(SLOW, replicas=1)
    assert section.method == "dense" and len(lines) == 1
    recipe = tiny("exchange.method=topk")
    assert choice.settle(recipe, divide(recipe), Processes(Topology(), CPU), print) is recipe
    begun = tiny("exchange.method=gtopk", "exchange.pattern=tree").exchange
    section, lines = resolved(FAST, begun=begun)
    assert section == begun and len(lines) == 1


def test_ranks_agree_over_replicas_and_stages_though_each_finds_another_link(resolved):
    section, lines = resolved(
        lambda rank: Link(0.001 * rank, 1e-6 * (4 - rank)),
        "parallel.stages=2",
        replicas=2,
        stages=2,
    )
    assert section.method != "auto" and lines[0].endswith("latency 3 ms, bandwidth 2 Mbit/s")


def find(link, rank):
    probe.measure = lambda group, device: link


@pytest.mark.multiprocess
def test_a_run_stores_its_method_and_keeps_it_when_links_change(tmp_path):
    folder = tmp_path / "run"
    keys = ("exchange.order=fast", f"run.output={folder}", "run.steps=3", "run.epochs=null")
    for link in (SLOW, FAST):
        ended = ranks.train(
            2,
            *ranks.SMALL,
            *keys,
            "exchange.method=auto",
            ANY,
            sabotage=functools.partial(find, link),
        )
        assert [(rank.code, rank.errors) for rank in ended] == [(0, []), (0, [])], ended
        assert ended[1].out == []
        assert loading.load(folder / "config.yaml").exchange.method == "topk"
    assert ended[0].out[0] == "exchange.method auto: topk, as the run began"
