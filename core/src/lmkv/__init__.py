"""KV-cache layer for LLM inference: a small core, storage backends as plugins.

Nothing happens at import: the public names below are fetched from their modules when they are first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take the name for typing's; importing typing would be the slowest part of all
if TYPE_CHECKING:
    from lmkv.backend import AsyncBackend as AsyncBackend
    from lmkv.backend import ResidentBackend as ResidentBackend
    from lmkv.backend import StorageBackendInterface as StorageBackendInterface
    from lmkv.backend import WrapperBackend as WrapperBackend
    from lmkv.config import Config as Config
    from lmkv.config import load_config as load_config
    from lmkv.engine import CacheEngine as CacheEngine
    from lmkv.errors import BackendError as BackendError
    from lmkv.errors import ClosedError as ClosedError
    from lmkv.errors import ConfigError as ConfigError
    from lmkv.errors import FrameError as FrameError
    from lmkv.errors import LmkvError as LmkvError
    from lmkv.errors import PluginError as PluginError
    from lmkv.errors import ProtocolError as ProtocolError
    from lmkv.hookspecs import hookimpl as hookimpl
    from lmkv.keys import Extras as Extras
    from lmkv.keys import KeyChain as KeyChain
    from lmkv.keys import MediaSpan as MediaSpan
    from lmkv.keys import Namespace as Namespace
    from lmkv.layout import PageLayout as PageLayout
    from lmkv.layout import PageRun as PageRun
    from lmkv.memory import MemoryObject as MemoryObject
    from lmkv.memory import Pool as Pool
    from lmkv.observe.metrics import Metrics as Metrics
    from lmkv.plugins import PluginHost as PluginHost
    from lmkv.specs import BackendSpec as BackendSpec
    from lmkv.specs import CodecSpec as CodecSpec
    from lmkv.specs import CommandSpec as CommandSpec
    from lmkv.specs import PolicySpec as PolicySpec
    from lmkv.types import Capabilities as Capabilities
    from lmkv.types import ChunkKey as ChunkKey
    from lmkv.types import Outcome as Outcome

_MODULES = {
    "backend": ("AsyncBackend", "ResidentBackend", "StorageBackendInterface", "WrapperBackend"),
    "config": ("Config", "load_config"),
    "engine": ("CacheEngine",),
    "errors": (
        "BackendError",
        "ClosedError",
        "ConfigError",
        "FrameError",
        "LmkvError",
        "PluginError",
        "ProtocolError",
    ),
    "hookspecs": ("hookimpl",),
    "keys": ("Extras", "KeyChain", "MediaSpan", "Namespace"),
    "layout": ("PageLayout", "PageRun"),
    "memory": ("MemoryObject", "Pool"),
    "observe.metrics": ("Metrics",),
    "plugins": ("PluginHost",),
    "specs": ("BackendSpec", "CodecSpec", "CommandSpec", "PolicySpec"),
    "types": ("Capabilities", "ChunkKey", "Outcome"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415  reads files

        return version("lmkv")
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'lmkv' has no attribute {name!r}")
    return getattr(import_module(f"lmkv.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "__version__"])
