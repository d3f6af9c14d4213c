"""Experiments of many small runs: large batches, LARS, grouped convolutions, rounding, schedules, exchanges."""
