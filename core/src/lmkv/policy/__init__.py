"""Eviction policies of the core; each enters through the same hook as a stranger's (`lmkv.builtin`)."""
