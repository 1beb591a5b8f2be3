"""`python -m lmkv.cli` is the command `lmkv`."""

from __future__ import annotations

from lmkv.cli import main

if __name__ == "__main__":
    main()
