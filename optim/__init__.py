"""Optimizers, schedules, stochastic rounding, persistent weights, averages, the loss scale.

There is one flat buffer for each kind of state (`weight_state`, `layout`), with parameters as
views: an update is a few large operations instead of thousands of small ones. `lars_update` steps
from state to state; `optimizer_update` steps any other optimizer in scratch memory. `lars_formula`
is the formula of LARS for one tensor: `lars.LARS` steps by it, and it is the reference of
`lars_update`.
"""
