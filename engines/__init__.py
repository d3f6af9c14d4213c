"""What an engine promises (`base`), and the engines for CPUs and GPUs, and for IPUs.

Micro batches feed the engine for CPUs and GPUs, whole updates from PopTorch's loader that for IPUs; the loop passes on
what it got. Residuals of sparse exchange are not in the engine's state: `replica_states` returns them one replica at a
time, so no process ever holds a thousand. The IPU engine alone imports PopTorch.
"""
