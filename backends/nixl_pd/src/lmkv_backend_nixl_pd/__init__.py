"""Prefill → decode transfer over NIXL, and the proxy before the engines."""
