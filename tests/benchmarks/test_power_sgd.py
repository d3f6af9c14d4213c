"""PowerSGD on DDP: which runs count as finished."""

from benchmarks import power_sgd
from benchmarks.power_sgd import Outcome, Side


def test_a_finished_run_is_that_of_as_many_replicas_only(tmp_path, monkeypatch):
    trained = []

    def run(replicas, *arguments):
        trained.append(replicas)
        return [Outcome(0.9, replicas)] * replicas

    monkeypatch.setattr(power_sgd, "CACHE", tmp_path)
    monkeypatch.setattr(power_sgd.ranks, "run", run)
    for replicas in (4, 4, 2):
        monkeypatch.setattr(power_sgd, "REPLICAS", replicas)
        assert power_sgd.outcome(Side("digits", "LARS", True), 0) == Outcome(0.9, replicas)
    assert trained == [4, 2]
