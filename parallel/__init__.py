"""Replicas and stages, how ranks meet and end, pipelines, the exchange of gradients.

The launcher starts ranks itself: torchrun and its elastic agent cannot tell exit codes apart, give
a dead rank's peers 30 s, and set signal handlers of their own. Ranks and trials die with the
process that started them. A replica's stages are neighbours in rank, because activations travel
more often than gradients. Schedules are given numbers in place of images (`pipeline`): the first
stage fetches each micro batch when it needs it, and the last receives its labels separately. Sparse
exchange uses point-to-point messages on the replicas' groups and no hooks of DDP, whose buckets
would each select for themselves. Cost formulae import no torch: plans use them as well as
`exchange.method: auto`.
"""
