"""KV-cache layer for LLM inference: a small core, storage backends as plugins."""
