"""Commands around a run: plan, doctor, sweep, report, export, shards, curves, launch.

`planning/` predicts from a few figures of a machine, each with its source. `diagnosis/` measures
steps, images and links, judges by pure rules, and writes such a machine. Both use one model of a
step. `sweeping/study.py` alone imports Optuna; a trial is an ordinary run in a folder of its own,
drawn in memory and stored whole, so that a kill falls between trials. `reporting/` reads run
folders only; the page it writes forbids the browser every request.
"""
