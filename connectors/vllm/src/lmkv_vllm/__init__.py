"""lmkv as a KV connector of vLLM."""
