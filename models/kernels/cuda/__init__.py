"""Kernels in CUDA C++, compiled at run time by NVRTC: see docs/gpu.md."""
