"""Predicted seconds of an exchange, against its messages counted one by one and against published figures."""

import re
import sys

import pytest
import torch
import yaml

from parallel import costs, exchange
from parallel.costs import Link
from parallel.exchange import Gradient
from recipe.exchange import Exchange
from tests.conftest import ROOT

# Fitted by Shi et al. to their Ethernet of 1 Gbit/s (scripts/icdcs2019/communication.py of their repository): seconds,
# and seconds for each float32.
PUBLISHED = Link(0.436e-3, 3.6e-5 * 1e-3 / 4)
SIMPLE = Link(1.0, 0.25)


def arrivals(hops, size, start):
    """When the last replica is done, if both ends of each message are busy with it, and only with it, until it came."""
    done = list(start)
    for pairs in hops:
        before = list(done)
        for source, target in pairs:
            end = max(before[source], before[target]) + SIMPLE.message(size)
            done[source], done[target] = max(done[source], end), max(done[target], end)
    return max(done)


def tree_hops(replicas):
    """Pairs (source, target) of each round, up and then down."""
    up, distance = [], 1
    while distance < replicas:
        up.append([(low + distance, low) for low in range(0, replicas - distance, 2 * distance)])
        distance *= 2
    return [*up, *([(low, high) for high, low in pairs] for pairs in reversed(up))]


def butterfly_hops(replicas):
    power = 1
    while 2 * power <= replicas:
        power *= 2
    extra = [(power + number, number) for number in range(replicas - power)]
    rounds, distance = [], 1
    while distance < power:
        rounds.append([(number, number ^ distance) for number in range(power)])
        distance *= 2
    return [extra, *rounds, [(low, high) for high, low in extra]] if extra else rounds


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 32])
def test_hops_played_through_take_what_is_predicted(replicas):
    start = [0.0] * replicas
    for name, hops in (("gtopk tree", tree_hops(replicas)), ("gtopk butterfly", butterfly_hops(replicas))):
        method = exchange.named(name)  # at a density of 0.001 one value and its index, 8 bytes
        assert arrivals(hops, 8, start) == method.seconds(SIMPLE, replicas, Gradient(1000)), name


def test_one_replica_costs_nothing():
    methods = [exchange.named("none"), *exchange.variants(Exchange(method="auto"))]
    assert len(methods) == 7
    assert {method.seconds(SIMPLE, 1, Gradient(1000)) for method in methods} == {0.0}


@pytest.mark.parametrize(
    ("replicas", "dense", "gtopk"),
    [(4, 1418, 9.3), (8, 1658, 13.9), (16, 1783, 18.6), (32, 1855, 23), (128, 1983, 32.5)],
)
def test_published_milliseconds(replicas, dense, gtopk):
    """25 Mi gradients at a density of 0.001; the published figures have two to four digits."""
    gradient = Gradient(25 * 2**20)
    assert 1000 * exchange.named("dense").seconds(PUBLISHED, replicas, gradient) == pytest.approx(dense, rel=1e-3)
    assert 1000 * exchange.named("gtopk tree").seconds(PUBLISHED, replicas, gradient) == pytest.approx(gtopk, rel=0.02)


def test_local_steps_cost_a_share_of_a_dense_exchange():
    """The mean over eight updates; without latency, fragments change nothing."""
    gradient, link = Gradient(10**6), Link(0.0, 1e-9)
    local = exchange.of(Exchange(method="local"))
    assert local.seconds(link, 8, gradient) == pytest.approx(exchange.named("dense").seconds(link, 8, gradient) / 8)
    levels = [(4, link), (2, link)]
    assert local.seconds_over(levels, 8, gradient, 4) == pytest.approx(
        exchange.named("dense").seconds_over(levels, 8, gradient, 4) / 8
    )


def test_sketches_of_updates_go_around_a_ring_beside_the_messages():
    """61 float32 numbers of each of 10 layers; none where gradients are compressed."""
    gradient, link = Gradient(10**6, layers=10), Link(1e-3, 1e-6)
    found = {
        compress: exchange.of(Exchange(method="topk", compress=compress)).seconds(link, 4, gradient)
        for compress in ("update", "gradient")
    }
    assert found["update"] - found["gradient"] == pytest.approx(6 * (1e-3 + 4 * 61 * 10 / 4 * 1e-6))


@pytest.mark.parametrize("link", [Link(0.0, 1e-9), Link(1e-3, 0.0), Link(1e-4, 1e-9)])
def test_the_tree_beats_a_gather_from_eight_replicas_on(link):
    """P - 1 > 2 log2 P; a butterfly, which needs half the hops, does from four on."""
    gather, tree, butterfly = (
        [exchange.named(name).seconds(link, replicas, Gradient(6_250_000)) for replicas in (4, 8, 16)]
        for name in ("topk", "gtopk tree", "gtopk butterfly")
    )
    assert [own < other for own, other in zip(tree, gather)] == [False, True, True]
    assert [own < other for own, other in zip(butterfly, gather)] == [True, True, True]
    assert tree == pytest.approx([2 * seconds for seconds in butterfly])


def test_half_sends_half_the_bytes_in_as_many_messages():
    half, dense = exchange.named("half"), exchange.named("dense")
    assert half.seconds(Link(0.0, 1e-9), 8, Gradient(10**6)) == dense.seconds(Link(0.0, 1e-9), 8, Gradient(10**6)) / 2
    assert half.seconds(Link(1e-3, 0.0), 8, Gradient(10**6)) == dense.seconds(Link(1e-3, 0.0), 8, Gradient(10**6))


@pytest.mark.parametrize("wire", ["float32", "float16"])
@pytest.mark.parametrize("entries", [1, 2, 7, 6250])
def test_a_message_is_as_long_as_what_is_sent(entries, wire):
    from parallel.messages import Sparse, Wire

    vector, form = Sparse(torch.arange(entries), torch.ones(entries)), Wire(getattr(torch, wire))
    assert costs.message_bytes(entries, wire) == form.pack(vector)[0].nbytes == 4 * form.words(entries)


def test_the_model_needs_no_torch():
    """Plans are made by commands that start at once."""
    import subprocess

    code = "import sys; from parallel import exchange; exchange.named('topk'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_the_docs_is_that_of_the_formulae():
    """docs/exchange.md, EfficientNet-B4 G16: 19,328,168 parameters, 161 of more than one dimension."""
    text = (ROOT / "docs" / "exchange.md").read_text()
    lines = [
        line.split(" | ") for line in text.partition("32 replicas: MB | ms |")[2].partition("\n\n")[0].splitlines()
    ]
    gradient, link = Gradient(19_328_168, 0, 161), Link(5e-5, 8e-9)
    for name, *figures in lines[2:]:
        method, *keys = re.findall("`(.*?)`", name)
        given = yaml.safe_load("{" + ", ".join(key if ": " in key else f"pattern: {key}" for key in keys) + "}")
        made = exchange.of(Exchange(method=method, **given))
        expected = [
            value
            for replicas in (8, 32)
            for value in (
                made.bytes_sent(replicas, gradient) / 1e6,
                1e3 * made.seconds(link, replicas, gradient),
            )
        ]
        assert [float(text.strip(" |").replace(",", "")) for text in figures] == pytest.approx(expected, rel=0.05)
    assert len(lines) > 10
