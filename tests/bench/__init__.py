"""Measurements of lmkv as ratios of one run: `make bench`, `make bench ONLY=name`. Nothing here is a test."""
