"""EfficientNet as a list of named blocks, normalisation, preprocessing, cuts into stages, kernels for GPUs.

`shapes` describes the blocks as numbers and `balance` chooses where to cut. Neither needs torch, so a plan takes a
second; tests compare the numbers with the modules to the last element. `kernels/` holds Triton code, one kernel a
file, imported only where it is used. Tests run kernels in Triton's interpreter and compile them for a GPU.
"""
