"""What a run is: the schema of a recipe, YAML with `extends` and overrides, checks across sections,
batch arithmetic, keys of random draws, options of IPUs as data. Nothing here imports torch, so a
mistake in a recipe costs a second.
"""
