"""A stand-in for popdist, from the environment that poprun gives its instances.

Sources: PopTorch 3.4, tests/popdist_test.py; Graphcore's examples (sdk-release-3.4), vision/cnns/pytorch/utils/
distributed.py and train/train.py; variables as in a log of poprun's. Instances are joined by gloo in place of Poplar.
"""

import os

from torch import distributed


def isPopdistEnvSet():
    """Whether poprun started this process."""
    return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ


def init():
    """Joins the instances; nothing to do for one."""
    if getNumInstances() > 1 and not distributed.is_initialized():
        distributed.init_process_group("gloo", rank=getInstanceIndex(), world_size=getNumInstances())


def getNumTotalReplicas():
    """Replicas of all instances."""
    return int(os.environ.get("POPDIST_NUM_TOTAL_REPLICAS", "1"))


def getNumLocalReplicas():
    """Replicas of this instance."""
    return int(os.environ.get("POPDIST_NUM_LOCAL_REPLICAS", "1"))


def getNumIpusPerReplica():
    """IPUs of one replica."""
    return int(os.environ.get("POPDIST_NUM_IPUS_PER_REPLICA", "1"))


def getReplicaIndexOffset():
    """Number of this instance's first replica."""
    return int(os.environ.get("POPDIST_REPLICA_INDEX_OFFSET", "0"))


def getNumInstances():
    """Processes."""
    return getNumTotalReplicas() // getNumLocalReplicas()


def getInstanceIndex():
    """This process among them."""
    return getReplicaIndexOffset() // getNumLocalReplicas()


def execute_on_instances(instances, func, *args, **kwargs):
    """Calls func in the instances of a set, while the others wait; returns its result there, None elsewhere."""
    result = func(*args, **kwargs) if getInstanceIndex() in instances else None
    if distributed.is_initialized():
        distributed.barrier()
    return result
