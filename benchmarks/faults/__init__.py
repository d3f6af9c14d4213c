"""Faults at random moments of real runs: after each, the resumed run must end with the undisturbed
run's bits.
"""
