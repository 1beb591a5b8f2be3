"""Host memory as an lmkv tier."""
