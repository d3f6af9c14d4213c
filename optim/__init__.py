"""Optimizers, schedules, stochastic rounding, persistent weights, averages, the loss scale.

There is one flat buffer per kind of state (`weight_state`, `layout`), with parameters as views: an update is a few
large operations instead of thousands of small ones. `lars_update` steps from state to state; `optimizer_update` steps
any other optimizer in scratch memory. `lars.LARS` is an optimizer like any other and the reference for `lars_update`.
"""
