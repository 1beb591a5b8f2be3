"""Host memory as an lmkv tier: keeps memory objects of the pool by reference, copies nothing."""
