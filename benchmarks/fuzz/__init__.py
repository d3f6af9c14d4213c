"""Damaged and hostile input by the ten thousand: recipes, images, shards, runs, studies, checkpoints, programs."""
