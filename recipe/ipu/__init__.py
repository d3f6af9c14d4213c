"""A run on Graphcore's IPUs as plain data: PopTorch's options and optimizer, what IPUs refuse, and
what poprun started.

Nothing here imports PopTorch, so that such a run can be checked and planned on any machine.
"""
