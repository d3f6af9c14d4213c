"""The loop, evaluation, checkpoints, metrics, the run folder, loggers.

The loop knows no files: `run` and `run_folder` stand beside it. A checkpoint is valid only with its
manifest (step, score, size and SHA-256 of each file, checksum of itself), which is renamed into
place after it. Decisions that are measured are made once in a run and stored (`choices`). Engines
and exported programs share one interface for predictions, so `evaluate.py` scores both. If
TensorBoard's files cannot be written the run ends, as for all files; a logging service that fails
never ends a run.
"""
