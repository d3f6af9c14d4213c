"""All-gather and all-to-all of few bytes in ceil(log2 P) rounds.

They are for where a message to each replica would be too many.

Source: Bruck et al., 1997, Efficient algorithms for all-to-all communications in multiport
message-passing systems.
"""

from __future__ import annotations

from itertools import accumulate
from typing import List, NamedTuple, Sequence

import torch
from torch import distributed

from parallel.groups import Group, begun


class Round(NamedTuple):
    """One message that a replica sends and one that it receives, at the same time.

    outgoing: contiguous tensor that is sent.
    receiver: replica that gets it.
    incoming: contiguous tensor that is written to.
    sender: replica that it comes from.
    """

    outgoing: torch.Tensor
    receiver: int
    incoming: torch.Tensor
    sender: int


def all_gather(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    group: Group,
) -> List[torch.Tensor]:
    """Gather a tensor of each replica on all of them. Every replica calls.

    Args:
        tensor: contiguous [sizes[rank]], of this replica; any dtype, the same on all.
        sizes: elements that each replica gives, the same list on all.
        group: the replicas.

    Returns:
        The tensor of each replica, [sizes[replica]], in their order.
    """
    rank = distributed.get_rank(group)
    replicas = len(sizes)
    # This replica's elements come first, then those of the replicas after it, around the ring.
    turned = [sizes[(rank + place) % replicas] for place in range(replicas)]
    starts = [0, *accumulate(turned)]
    gathered = tensor.new_empty(starts[-1])
    gathered[: starts[1]] = tensor
    # In each round a replica sends all that it has, so the number of tensors doubles.
    rounds = []
    for distance in _distances(replicas):
        count = min(distance, replicas - distance)
        message = Round(
            outgoing=gathered[: starts[count]],
            receiver=(rank - distance) % replicas,
            incoming=gathered[starts[distance] : starts[distance + count]],
            sender=(rank + distance) % replicas,
        )
        rounds.append(message)
    transfer(rounds, group)
    # From the order around the ring back to that of the replicas.
    parts = gathered.split(turned)
    return [parts[(replica - rank) % replicas] for replica in range(replicas)]


def all_to_all(elements: torch.Tensor, group: Group) -> torch.Tensor:
    """Exchange one element with each replica. Every replica calls.

    Args:
        elements: [P], the one for each replica; any dtype, the same on all.
        group: the P replicas.

    Returns:
        The element from each replica, [P], in their order.
    """
    rank = distributed.get_rank(group)
    replicas = len(elements)
    places = torch.arange(replicas, device=elements.device)
    # An element's place tells how far up the ring it has to go; each round does one bit of that.
    held = elements.roll(-rank)
    for distance in _distances(replicas):
        moving = (places & distance).nonzero().flatten()
        # A copy: what comes in takes the places of what leaves.
        outgoing = held[moving]
        message = Round(
            outgoing=outgoing,
            receiver=(rank + distance) % replicas,
            incoming=torch.empty_like(outgoing),
            sender=(rank - distance) % replicas,
        )
        transfer([message], group)
        held[moving] = message.incoming
    # What replica r has sent is `rank - r` places up the ring from it.
    return held[(rank - places) % replicas]


def _distances(replicas: int) -> List[int]:
    """Return the powers of two below the number of replicas."""
    return [1 << bit for bit in range((replicas - 1).bit_length())]


def transfer(rounds: Sequence[Round], group: Group) -> None:
    """Send and receive in each round, one after the other.

    Args:
        rounds: a round may send what the one before it has received.
        group: the replicas that senders and receivers are numbered in.
    """
    if rounds and rounds[0].outgoing.device.type == "cpu":
        _transfer_by_gloo(rounds, group)
        return
    # NCCL needs both in one batch, or two neighbours wait for each other.
    for message in rounds:
        receive = distributed.P2POp(
            distributed.irecv,
            message.incoming,
            group=group,
            group_peer=message.sender,
        )
        send = distributed.P2POp(
            distributed.isend,
            message.outgoing,
            group=group,
            group_peer=message.receiver,
        )
        for work in distributed.batch_isend_irecv([receive, send]):
            work.wait()


def _transfer_by_gloo(rounds: Sequence[Round], group: Group) -> None:
    """Do what `transfer` does, with all receives begun in advance.

    Gloo sends when it has word that the receiver is ready, and that word waits behind what the
    receiver sends.
    """
    # Each round has a tag: gloo pairs messages of two ranks by it, in whatever order they come.
    receiving = []
    for tag, message in enumerate(rounds):
        work = distributed.irecv(message.incoming, group=group, group_src=message.sender, tag=tag)
        receiving.append(begun(work))
    sending = []
    for tag, message in enumerate(rounds):
        work = distributed.isend(message.outgoing, group=group, group_dst=message.receiver, tag=tag)
        sending.append(begun(work))
        # The next round may send what this one receives.
        receiving[tag].wait()
    for work in sending:
        work.wait()
