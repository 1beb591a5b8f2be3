"""Whole requests that move from the node that computes them (prefill) to the node that goes on with them (decode).

Decode side (`Incoming`): `admit` sets memory aside for the whole request, pushed frames take of it, `finish` gives the
rest back. What has arrived is an ordinary chunk of the index, which the transfer holds until a look-up has leased it
(`let_go`) or its time is over. Prefill side (`Outgoing`): `send` pushes chunks as they become READY here.

Both run on the storage loop; a node has one of each (`PeerNode.incoming`, `PeerNode.outgoing`).
"""

from __future__ import annotations

from lmkv.peer.incoming import Incoming
from lmkv.peer.outgoing import Outgoing

__all__ = ["Incoming", "Outgoing"]
