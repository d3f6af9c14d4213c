"""Benchmarks, one file per claim; evidence/ has experiments of many runs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "benchmarks" / "cache"
RESULTS = ROOT / "docs" / "results"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
QUIET = ("log.tensorboard=false", "log.trust_ratios=false")  # overrides: what runs that only benchmarks look at omit
