"""A local file system as an lmkv tier: one file per frame, published by rename, found again after a restart."""
