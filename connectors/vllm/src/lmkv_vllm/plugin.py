"""Entry point of vLLM's general plugins: makes the connector known by its name.

With it `kv_connector: LMKVConnector` is enough (`kv_connector_module_path` is not needed), also below `MultiConnector`.
vLLM runs it in every one of its processes, perhaps more than once.
"""

from __future__ import annotations

NAME = "LMKVConnector"
MODULE = "lmkv_vllm.connector"


def register() -> None:
    """Register the connector. Idempotent; imports neither the connector nor torch."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  vLLM calls us

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001  there is no public way to ask, and twice is an error
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
