"""Measurements of lmkv as ratios of one run: `make bench`, `make bench ONLY=name`. Nothing here is a test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the rigs of servers, which tests import by bare names
