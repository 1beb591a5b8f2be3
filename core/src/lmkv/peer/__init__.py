"""Nodes that read from and write to each other's pools: the protocol, and the transports that carry the bytes."""
