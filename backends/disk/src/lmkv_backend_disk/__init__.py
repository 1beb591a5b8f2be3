"""A local file system as an lmkv tier."""
