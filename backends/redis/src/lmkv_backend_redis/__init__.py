"""Redis or Valkey as an lmkv tier: one server, sentinel or cluster, over TCP, TLS or a unix socket."""
