"""Other nodes' pools as an lmkv tier: read-only, over the peer protocol."""
