"""What an engine promises (`base`), and the engines for CPUs and GPUs, and for IPUs.

An engine defines how it is fed: micro batches for CPU and CUDA, whole updates from PopTorch's loader for IPUs; the
loop passes on what it got. Residuals of sparse exchange belong to one replica and are not in the engine's state:
`replica_states` returns them one replica at a time, so no process ever holds a thousand residuals. The IPU engine
keeps a copy of weights and momentum on the host, in the form that all engines save; it alone imports PopTorch.
"""
