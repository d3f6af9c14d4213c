"""What the product uses of popdist, from the environment that poprun gives its instances.

Sources: PopTorch 3.4, tests/popdist_test.py; Graphcore's examples (sdk-release-3.4),
vision/cnns/pytorch/utils/distributed.py and train/train.py; variables as in a log of poprun's.
Instances are joined by gloo in place of Poplar.
"""

import os

from torch import distributed


def init():
    """Joins the instances; nothing to do for one."""
    instances = getNumTotalReplicas() // getNumLocalReplicas()
    if instances > 1 and not distributed.is_initialized():
        instance = int(os.environ["POPDIST_REPLICA_INDEX_OFFSET"]) // getNumLocalReplicas()
        distributed.init_process_group("gloo", rank=instance, world_size=instances)


def getNumTotalReplicas():
    return int(os.environ["POPDIST_NUM_TOTAL_REPLICAS"])


def getNumLocalReplicas():
    return int(os.environ["POPDIST_NUM_LOCAL_REPLICAS"])


def getNumIpusPerReplica():
    return int(os.environ["POPDIST_NUM_IPUS_PER_REPLICA"])
