"""What `parallel.elastic` promises, measured: strikes at random moments, replicas of different
speeds, overhead.
"""
