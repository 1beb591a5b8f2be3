"""`lmkv schema`: the JSON Schema of the configuration, built from the installed plugins."""

from __future__ import annotations

import json

from lmkv.config import json_schema
from lmkv.plugins import PluginHost


def run() -> int:
    """Print the schema."""
    print(json.dumps(json_schema(PluginHost.discover()), indent=2))
    return 0
