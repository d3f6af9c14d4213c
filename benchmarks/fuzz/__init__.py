"""Damaged and hostile input by the ten thousand.

It comes as recipes, images, shards, runs, studies, checkpoints and programs.
"""
