"""Predicted seconds of an exchange, against its messages counted one by one and against published
figures."""

import re
import subprocess
import sys

import pytest
import yaml

from parallel import exchange
from parallel.costs import Link
from parallel.exchange import Gradient
from recipe.exchange import Exchange
from tests.conftest import ROOT

# Fitted by Shi et al. to their Ethernet of 1 Gbit/s (scripts/icdcs2019/communication.py of their
# repository): seconds, and seconds for each float32.
PUBLISHED = Link(0.436e-3, 3.6e-5 * 1e-3 / 4)
SIMPLE = Link(1.0, 0.25)
BYTES = Link(0.0, 1e-9)
LATENCY = Link(1e-3, 0.0)


def seconds(name, link=SIMPLE, replicas=8, elements=10**6):
    return exchange.named(name).seconds(link, replicas, Gradient(elements))


@pytest.mark.parametrize(
    ("replicas", "gather", "tree", "butterfly"),
    [
        (2, 1, 2, 1),
        (3, 2, 4, 3),
        (4, 3, 4, 2),
        (5, 4, 6, 4),
        (8, 7, 6, 3),
        (9, 8, 8, 5),
        (31, 30, 10, 6),
    ],
)
def test_messages_one_after_the_other(replicas, gather, tree, butterfly):
    """Up a tree and down again; or in pairs, with a round before and after where P is no power of
    two. At a density of 0.001 a message has one value and its index, 8 bytes."""
    for name, rounds in (("topk", gather), ("gtopk tree", tree), ("gtopk butterfly", butterfly)):
        assert seconds(name, SIMPLE, replicas, 1000) == rounds * (1.0 + 8 * 0.25), name


def test_owners_send_parts_and_gather_them():
    """8 replicas, 8000 entries: counts in 3 rounds, 7 parts of 1000 entries, bins and parts in 3
    rounds each."""
    assert seconds("gtopk owners", LATENCY, 8, 8_000_000) == pytest.approx((3 + 7 + 3 + 3) * 1e-3)
    sent = 3 * 4 * 4 + 7 * 8000 + 7 * 64 + 7 * 8000
    assert seconds("gtopk owners", BYTES, 8, 8_000_000) == pytest.approx(sent * 1e-9)


@pytest.mark.parametrize(
    "keys", [{"method": "auto"}, {"method": "topk", "bits": 4}, {"method": "half"}], ids=str
)
def test_one_replica_costs_nothing(keys):
    """In all forms that are compared, with the keys of the section that it has."""
    methods = [exchange.named("none"), *exchange.variants(Exchange(**keys))]
    assert len(methods) == 7
    assert {method.seconds(SIMPLE, 1, Gradient(1000)) for method in methods} == {0.0}


@pytest.mark.parametrize(
    ("replicas", "dense", "gtopk"), [(4, 1418, 9.3), (16, 1783, 18.6), (128, 1983, 32.5)]
)
def test_published_milliseconds(replicas, dense, gtopk):
    """25 Mi gradients at a density of 0.001; the published figures have two to four digits."""
    assert 1000 * seconds("dense", PUBLISHED, replicas, 25 * 2**20) == pytest.approx(
        dense, rel=1e-3
    )
    assert 1000 * seconds("gtopk tree", PUBLISHED, replicas, 25 * 2**20) == pytest.approx(
        gtopk, rel=0.02
    )


def test_local_steps_and_half_cost_a_share_of_a_dense_exchange():
    """The mean over eight updates. Half: in as many messages."""
    local = exchange.of(Exchange(method="local"))
    dense = exchange.named("dense")
    for levels in ([(8, BYTES)], [(4, BYTES), (2, BYTES)]):
        found, expected = (
            each.seconds_over(levels, 8, Gradient(10**6), 4) for each in (local, dense)
        )
        assert found == pytest.approx(expected / 8)
    assert seconds("half", BYTES) == seconds("dense", BYTES) / 2
    assert seconds("half", LATENCY) == seconds("dense", LATENCY)


def test_sketches_of_updates_go_around_a_ring_beside_the_messages():
    """61 float32 numbers of each of 10 layers; none where gradients are compressed."""
    gradient = Gradient(10**6, layers=10)
    link = Link(1e-3, 1e-6)
    update, plain = (
        exchange.of(Exchange(method="topk", compress=compress)).seconds(link, 4, gradient)
        for compress in ("update", "gradient")
    )
    assert update - plain == pytest.approx(6 * (1e-3 + 4 * 61 * 10 / 4 * 1e-6))


def test_the_model_needs_no_torch():
    """Plans are made by commands that start at once."""
    code = "import sys; from parallel import exchange; exchange.named('topk'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_the_docs_is_that_of_the_formulae():
    """docs/exchange.md, EfficientNet-B4 G16: 19,328,168 parameters, 161 of more than one
    dimension."""
    text = (ROOT / "docs" / "exchange.md").read_text()
    table = text.partition("32 replicas: MB | ms |")[2].partition("\n\n")[0]
    gradient = Gradient(19_328_168, 0, 161)
    link = Link(5e-5, 8e-9)
    rows = [line.split(" | ") for line in table.splitlines()][2:]
    for name, *figures in rows:
        method, *keys = re.findall("`(.*?)`", name)
        given = yaml.safe_load(
            "{" + ", ".join(key if ": " in key else f"pattern: {key}" for key in keys) + "}"
        )
        made = exchange.of(Exchange(method=method, **given))
        expected = []
        for replicas in (8, 32):
            expected += [
                made.bytes_sent(replicas, gradient) / 1e6,
                1e3 * made.seconds(link, replicas, gradient),
            ]
        assert [float(text.strip(" |").replace(",", "")) for text in figures] == pytest.approx(
            expected, rel=0.05
        )
    assert len(rows) > 8
