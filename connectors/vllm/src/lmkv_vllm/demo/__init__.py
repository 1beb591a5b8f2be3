"""A real vLLM served through lmkv: `python -m lmkv_vllm.demo`. Also the models that the tests serve."""
