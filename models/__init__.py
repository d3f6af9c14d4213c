"""EfficientNet as a list of named blocks, layers, cuts into stages, kernels for GPUs and CPUs.

`shapes` describes the blocks as numbers and `balance` chooses where to cut. Neither needs torch, so
a plan takes a second. `kernels/` holds Triton and CUDA code, imported only where it is
used.
"""
