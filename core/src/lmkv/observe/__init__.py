"""Counters, their Prometheus page, and logs."""
