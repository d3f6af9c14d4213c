"""A stand-in for Horovod: horovod.torch only."""
