"""All-gather and all-to-all of few bytes in ceil(log2 P) rounds, where a message to each replica would be too many.

Source: Bruck et al., 1997, Efficient algorithms for all-to-all communications in multiport message-passing systems.
"""

from __future__ import annotations

from itertools import accumulate
from typing import List, Sequence, Tuple

import torch
from torch import distributed

Round = Tuple[torch.Tensor, int, torch.Tensor, int]  # what is sent, to whom, where what comes is put, from whom


def all_gather(own: torch.Tensor, sizes: Sequence[int], group: distributed.ProcessGroup) -> List[torch.Tensor]:
    """What each replica gives, by replica. Every replica calls.

    Args: own: [sizes[rank]], contiguous. sizes: elements that each replica gives, the same on all.
    """
    rank, replicas = distributed.get_rank(group), len(sizes)
    turned = [sizes[(rank + place) % replicas] for place in range(replicas)]  # this replica's first
    starts = [0, *accumulate(turned)]
    held = own.new_empty(starts[-1])
    held[: starts[1]] = own
    rounds = []
    for distance in _distances(replicas):
        count = min(distance, replicas - distance)
        coming = held[starts[distance] : starts[distance + count]]
        rounds.append((held[: starts[count]], (rank - distance) % replicas, coming, (rank + distance) % replicas))
    transfer(rounds, group)
    parts = held.split(turned)
    return [parts[(replica - rank) % replicas] for replica in range(replicas)]


def all_to_all(own: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """One element from each replica, [P], by replica. Every replica calls. Args: own: [P], one for each replica."""
    rank, replicas = distributed.get_rank(group), len(own)
    places = torch.arange(replicas, device=own.device)
    held = own.roll(-rank)
    for distance in _distances(replicas):
        moving = (places & distance).nonzero().flatten()
        coming = torch.empty_like(held[moving])
        transfer([(held[moving], (rank + distance) % replicas, coming, (rank - distance) % replicas)], group)
        held[moving] = coming
    return held[(rank - places) % replicas]


def _distances(replicas: int) -> List[int]:
    return [1 << bit for bit in range((replicas - 1).bit_length())]


def transfer(rounds: Sequence[Round], group: distributed.ProcessGroup) -> None:
    """Send and receive in each round, one after the other; a round may send what the one before has brought."""
    if rounds and rounds[0][0].device.type == "cpu":
        # Gloo sends when it has word that the receiver is ready, and that word waits behind what the receiver sends.
        receiving = [
            distributed.irecv(coming, group=group, group_src=source, tag=tag)
            for tag, (_, _, coming, source) in enumerate(rounds)
        ]
        sending = []
        for tag, (leaving, target, _, _) in enumerate(rounds):
            sending.append(distributed.isend(leaving, group=group, group_dst=target, tag=tag))
            receiving[tag].wait()
        for work in sending:
            work.wait()
        return
    for leaving, target, coming, source in rounds:  # NCCL: in one batch, else two neighbours wait for each other
        receive = distributed.P2POp(distributed.irecv, coming, group=group, group_peer=source)
        send = distributed.P2POp(distributed.isend, leaving, group=group, group_peer=target)
        for work in distributed.batch_isend_irecv([receive, send]):
            work.wait()
