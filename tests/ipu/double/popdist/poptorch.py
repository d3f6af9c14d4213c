"""popdist.poptorch.Options: replicas come from poprun and cannot be set (PopTorch 3.4,
tests/popdist_test.py)."""

from poptorch import options

import popdist


class Options(options.Options):
    """poptorch.Options of one instance. ipus_per_replica: RuntimeError where poprun was given
    another number."""

    def __init__(self, ipus_per_replica=1):
        super().__init__()
        if popdist.getNumIpusPerReplica() != ipus_per_replica:
            raise RuntimeError(
                f"poprun gives a replica {popdist.getNumIpusPerReplica()} IPUs, not {ipus_per_replica}"
            )

    @property
    def replicas(self):
        return popdist.getNumLocalReplicas()

    def replicationFactor(self, replication_factor):
        raise RuntimeError("Cannot call `replicationFactor` with popdist.poptorch.Options")
