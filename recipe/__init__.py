"""What a run is: the schema of a recipe, YAML with `extends` and overrides, checks across sections, batch arithmetic,
keys of random draws.

Nothing here imports torch, so a mistake in a recipe costs a second. `randomness` is here because models, optimizer and
data all draw from it. Options of IPUs are data (`ipu`, `ipu_rules`, `ipu_optimizers`), so plans need no PopTorch.
"""
