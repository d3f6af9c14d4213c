"""Benchmarks, one file per claim; evidence/ has experiments of many runs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "benchmarks" / "cache"
RESULTS = ROOT / "docs" / "results"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
# Overrides that omit from a run what only people would look at.
QUIET = ("log.tensorboard=false", "log.trust_ratios=false")
