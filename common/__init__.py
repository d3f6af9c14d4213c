"""What every room may use and no recipe has a part in: files, JSON, YAML, texts, errors, cores,
C++, commands' starts.

Nothing here imports another room or torch.
"""
