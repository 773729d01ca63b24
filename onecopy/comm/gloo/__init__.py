"""CPU ranks on gloo: shared memory between ranks of a host, relay ranks between hosts.

Read in this order: topology, shared_memory, local_ranks, comm.
"""
