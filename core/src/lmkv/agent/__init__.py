"""The node's agent: tells a controller what lies here, and carries out what it asks.

`messages` is what both say to each other. This package is above `storage` and below the service that starts it.
"""
