"""A complete third-party backend for lmkv: the template to copy."""
