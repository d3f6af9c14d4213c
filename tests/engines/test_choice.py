"""exchange.method auto: the method that suits links and model, the same on all ranks, and for all of a run."""

import functools
import json

import pytest
import torch

from engines import choice
from models.balance import split_names
from models.efficientnet import build
from parallel import evidence, exchange, probe
from parallel.costs import Link
from parallel.evidence import Evidence
from parallel.exchange import Gradient
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide
from recipe.exchange import Exchange
from tests import ranks
from tests.conftest import QUICKSTART
from tests.engines import threads

SLOW, FAST = Link(2e-4, 4e-6), Link(1e-4, 1e-12)
SELECTION, ROUNDING = 0.004, 0.001
# Of so small a model the sketches would be longer than all else; and what was not measured may be taken.
ANY = "exchange.accept_loss=100"
GRADIENT = ("exchange.compress=gradient", ANY)


class Company(Processes):
    """Several ranks that all have the same values."""

    def __init__(self, replicas, stages=1):
        super().__init__(Topology(), torch.device("cpu"))
        self.topology = Topology(replicas, stages)

    def gather(self, value):
        return [value] * self.topology.world


@pytest.fixture
def resolved(tiny, monkeypatch):
    """resolved(link, *overrides): the section that auto becomes, and the lines that are reported.

    measured: what is known of losses, by default nothing.
    """

    def resolve(link, *overrides, replicas=8, stages=1, begun=None, selection=SELECTION, measured=()):
        for module in (evidence, exchange):
            monkeypatch.setattr(module, "MEASURED", measured)
        monkeypatch.setattr(probe, "measure", lambda group, device: link)
        monkeypatch.setattr(choice, "timed", lambda work, device, calls: [selection])
        lines = []
        recipe = tiny("exchange.method=auto", "run.device=cpu", "batch.micro=2", "batch.global=48", *overrides)
        processes = Company(replicas, stages)
        recipe = choice.resolve(recipe, divide(recipe, replicas), processes, lines.append, begun)
        assert loading.loads(loading.dump(recipe), "what was written") == recipe
        return recipe.exchange, lines

    return resolve


def predicted(replicas, link, *overrides, elements=1_000_000, whole=0, work=(SELECTION, ROUNDING)):
    """The candidates of the quickstart, by label."""
    recipe = loading.load(QUICKSTART, ["exchange.method=auto", "batch.micro=4", "run.device=cpu", *overrides])
    methods = exchange.candidates(recipe.exchange)
    found = choice.predict(methods, recipe, divide(recipe, replicas), Gradient(elements, whole), link, *work)
    return {candidate.method.section.label: candidate for candidate in found}


def test_slow_links_get_gtopk_and_fast_ones_dense(resolved):
    section, lines = resolved(SLOW, *GRADIENT)
    assert (section.method, section.pattern) == ("gtopk", "owners")
    assert lines[0].endswith(" 8 replicas; links: latency 0.2 ms, bandwidth 2 Mbit/s")
    assert lines[1].startswith("  dense  ") and lines[1].endswith("; exact")
    assert lines[-2].startswith("  taken: gtopk owners 0.001; ")
    assert lines[-1].startswith("  of those that lose 100 points of top-1 at most (exchange.accept_loss; docs/")
    assert max(map(len, lines)) <= 120
    section, lines = resolved(FAST)
    assert section.method == "dense"
    assert lines[-2] == "  taken: dense; below 10 ms no other is worth a change"
    assert any(line.startswith("  half ") for line in lines)
    _, lines = resolved(SLOW, "exchange.wire=float32")
    assert not any(line.startswith("  half ") for line in lines)


def test_predicted_seconds():
    """Written out for 4 replicas and 1000 of 1,000,000 values: a = 1 ms, b = 1 us."""
    link = Link(1e-3, 1e-6)
    found = predicted(4, link)
    # Owners: 2 counts of 4 bytes to half of the replicas, twice; 250 entries to each of three; 64 bytes of counts from
    # each of three and 250 entries, in two rounds each.
    owners = 2 * (1e-3 + 8e-6) + 3 * (1e-3 + 2e-3) + 4e-3 + 3 * 64e-6 + 3 * 2e-3
    expected = {
        "dense": 6 * (1e-3 + 1.0),
        "half": 6 * (1e-3 + 0.5) + ROUNDING,
        "topk 0.001": 3 * (1e-3 + 8e-3) + SELECTION,
        "gtopk owners 0.001": owners + SELECTION,
        "gtopk butterfly 0.001": 2 * (1e-3 + 8e-3) + SELECTION,
        "gtopk tree 0.001": 4 * (1e-3 + 8e-3) + SELECTION,
    }
    assert {name: found[name].seconds for name in expected} == pytest.approx(expected)
    sizes = {"dense": 6e6, "half": 3e6, "topk 0.001": 24e3, "gtopk butterfly 0.001": 16e3, "gtopk tree 0.001": 16e3}
    assert {name: found[name].size for name in sizes} == pytest.approx(sizes)


def test_what_biases_cost_beside_the_sparse_ones():
    link = Link(0.0, 1e-6)
    by_label = predicted(4, link, "exchange.dense_1d=true", elements=10**6, whole=4000, work=(0.0, 0.0))
    found = {name: each.seconds for name, each in by_label.items()}
    assert found["topk 0.001"] == pytest.approx(
        3 * 8 * 996e-6 + exchange.named("dense").seconds(link, 4, Gradient(4000))
    )
    assert found["dense"] == exchange.named("dense").seconds(link, 4, Gradient(10**6))


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ((15, 10.1, 10.1, 10.1, 10.1), "dense"),
        ((15, 10, 10, 10, 10), "half"),
        ((15, 10, 7, 7, 7), "half"),
        ((15, 11, 10, 7, 7, 7), "topk"),
        ((15, 11, 10, 6.6, 6, 6), "gtopk owners"),
        ((15, 11, 10, 7, 6.6, 6), "gtopk butterfly"),
        ((15, 10, 20, 20, 6.7, 4.4), "gtopk tree"),
        ((11e-3, 1e-3), "half"),
        ((9e-3, 1e-3), "dense"),
    ],
)
def test_more_is_lost_only_for_half_as_much_speed_again_and_not_for_milliseconds(times, taken):
    names = ("dense", "half", "topk", "gtopk owners", "gtopk butterfly", "gtopk tree")
    candidates = [choice.Candidate(exchange.named(name), network, 0.0) for name, network in zip(names, times)]
    assert choice.pick(candidates)[0].name == taken


@pytest.mark.parametrize(
    ("overrides", "taken"),
    [
        ((), "topk 0.05"),
        (("exchange.accept_loss=3",), "gtopk tree 0.02"),
        (("exchange.accept_loss=0.1",), "dense"),
        (("exchange.density_warmup=[0.25]",), "topk 0.05"),
        (("exchange.compress=gradient",), "dense"),
        (("exchange.delay=1", "exchange.compress=gradient"), "dense"),
        (("optimizer.name=sgd", "optimizer.trust=null"), "dense"),
    ],
)
def test_what_was_measured_to_lose_more_than_is_accepted_is_not_taken(resolved, overrides, taken):
    """Of others than these two nothing is known."""
    known = (
        (Exchange(method="topk", density=0.05), Evidence(0.4, 0.1)),
        (Exchange(method="gtopk", density=0.02), Evidence(2.5, 0.3)),
    )
    section, lines = resolved(SLOW, *overrides, measured=known)
    assert section.label == taken
    assert f"  taken: {taken}; " in "\n".join(lines)


@pytest.mark.parametrize(("accepted", "taken"), [("0.5", "dense, 4 bits"), ("0.1", "dense")])
def test_what_is_taken_by_what_was_measured_here(resolved, accepted, taken):
    section, lines = resolved(SLOW, f"exchange.accept_loss={accepted}", measured=evidence.MEASURED)
    assert section.label == taken
    assert any(line.endswith(f"; {evidence.MEASURED[0][1]}") for line in lines)


def test_selection_on_a_slow_processor_decides_too(resolved):
    link = Link(1e-4, 1e-8)
    assert resolved(link, *GRADIENT, selection=1e-4)[0].method == "gtopk"
    assert resolved(link, *GRADIENT, selection=0.1)[0].method == "dense"


def test_the_largest_stage_counts(tiny):
    """As the meta model is cut by names: parameters counted by hand from a built one."""
    recipe = tiny("exchange.method=auto", "parallel.stages=2", "parallel.split=[blocks.3.0]", "run.device=cpu")
    model = build(recipe.model, 0)
    parts = split_names(model.names, ["blocks.3.0"])
    sizes = [sum(each.numel() for name in names for each in model.block(name).parameters()) for names in parts]
    names = parts[sizes.index(max(sizes))]
    found = choice._gradient(recipe, divide(recipe, 1), Company(1, stages=2))
    layers = sum(each.dim() > 1 for name in names for each in model.block(name).parameters())
    assert found == Gradient(max(sizes), 0, layers)
    assert choice._gradient(recipe, divide(recipe, 1), Company(1)).elements == sum(sizes)


def test_keys_of_topk_are_left_out_with_dense(resolved):
    keys = ("exchange.density_warmup=[0.25]", "exchange.dense_1d=true", "exchange.density=0.01", ANY)
    section, lines = resolved(FAST, *keys)
    assert section == Exchange(method="dense", density=0.01)
    assert lines[-1] == "exchange.density_warmup, dense_1d: left out, as dense sends whole gradients"
    section, lines = resolved(SLOW, *keys)
    assert (section.method, section.density_warmup, section.dense_1d) == ("gtopk", [0.25], True)


def test_where_there_is_no_choice(resolved, tiny):
    section, lines = resolved(SLOW, replicas=1)
    assert section.method == "dense"
    assert lines == ["exchange.method auto: dense; one replica has nobody to send to"]
    recipe = tiny("exchange.method=topk")
    assert choice.resolve(recipe, divide(recipe), Company(4), print) is recipe
    begun = tiny("exchange.method=gtopk", "exchange.pattern=tree").exchange
    section, lines = resolved(FAST, begun=begun)
    assert (section, lines) == (begun, ["exchange.method auto: gtopk tree, as the run began"])


# Ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_agree_over_replicas_and_stages(tiny, monkeypatch, stages):
    """Selection really takes its time, and each rank finds another link."""
    monkeypatch.setattr(probe, "measure", lambda *_: Link(0.001 * threads.rank(), 1e-6 * (4 - threads.rank())))
    recipe = tiny("run.device=cpu", "batch.micro=2", "exchange.method=auto", f"parallel.stages={stages}")

    def choose(processes):
        lines = []
        return choice.resolve(recipe, divide(recipe, 4 // stages), processes, lines.append), lines

    found = threads.run(4, stages, choose)
    assert found == [found[0]] * 4
    chosen, lines = found[0]
    assert chosen.exchange.method != "auto"
    assert lines[0].endswith("latency 3 ms, bandwidth 2 Mbit/s")


def find(link, rank):
    probe.measure = lambda group, device: link


@pytest.mark.multiprocess
def test_a_run_stores_its_method_and_keeps_it_when_links_change(tmp_path, capfd):
    import evaluate

    folder = tmp_path / "run"
    keys = ("exchange.order=fast", f"run.output={folder}", "run.steps=4", "run.epochs=null")
    for link in (SLOW, FAST):
        ended = ranks.train(2, *ranks.SMALL, *keys, "exchange.method=auto", ANY, sabotage=functools.partial(find, link))
        assert [rank.code for rank in ended] == [0, 0], ended
        assert [rank.errors for rank in ended] == [[], []]
        assert ended[1].out == []
        assert loading.load(folder / "config.yaml").exchange.method == "topk"
    assert ended[0].out[0] == "exchange.method auto: topk, as the run began"
    content = torch.load(next(iter((folder / "checkpoints").glob("step-????????.pt"))), weights_only=True)
    assert loading.loads(content["recipe"], "checkpoint").exchange.method == "topk"
    assert evaluate.main(["--checkpoint", str(folder), "run.device=cpu", "exchange.method=auto"]) == 0
    assert "top1" in json.loads((folder / "evaluation" / "scores.json").read_text())
