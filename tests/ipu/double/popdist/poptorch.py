"""popdist.poptorch.Options: replicas and processes come from poprun and cannot be set (PopTorch 3.4,
tests/popdist_test.py)."""

from poptorch import option_groups, options

import popdist


def _blocked(name):
    return RuntimeError(f"Cannot call `{name}` with popdist.poptorch.Options")


class _Distributed(option_groups.DistributedOptions):
    def __init__(self):
        super().__init__()
        self.set(distributed_process_id=popdist.getInstanceIndex(), num_distributed_processes=popdist.getNumInstances())

    def disable(self):
        raise _blocked("Distributed.disable")

    def setEnvVarNames(self, var_num_processes, var_process_id):
        raise _blocked("Distributed.setEnvVarNames")

    def configureProcessId(self, process_id, num_processes=None):
        raise _blocked("Distributed.configureProcessId")


class Options(options.Options):
    """poptorch.Options of one instance.

    Args:
        ipus_per_replica: IPUs of one replica; RuntimeError where poprun was given another number.
    """

    def __init__(self, ipus_per_replica=1):
        super().__init__()
        if popdist.isPopdistEnvSet() and popdist.getNumIpusPerReplica() != ipus_per_replica:
            raise RuntimeError(f"poprun gives a replica {popdist.getNumIpusPerReplica()} IPUs, not {ipus_per_replica}")
        self.__dict__["_distributed"] = _Distributed()
        self.set(replication_factor=popdist.getNumLocalReplicas())

    def useIpuId(self, ipu_id):
        """Refused."""
        raise _blocked("useIpuId")

    def replicationFactor(self, replication_factor):
        """Refused."""
        raise _blocked("replicationFactor")
