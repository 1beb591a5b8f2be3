"""Whole requests that move from the node that computes them (prefill) to the node that goes on with them (decode).

Decode side: `admit` sets memory aside for the whole request, pushed frames take of it, `finish` gives the rest back.
What has arrived is an ordinary chunk of the index, which the transfer holds until a look-up has leased it (`let_go`)
or its time is over. Prefill side: `send` pushes chunks as they become READY here.

Everything runs on the storage loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmkv.peer import messages as m


class Incoming:
    """Transfers to this node."""

    def admit(self, asked: m.Admit) -> m.Admitted | m.NoRoom:
        """Set aside room for a whole request; `ConfigError` (kind ``too-large``) if it can never fit."""
        raise NotImplementedError

    async def wait(self, transfer: str, seconds: float) -> m.TransferState:
        """How a transfer stands; returns when it has ended, is not known, or after `seconds`."""
        raise NotImplementedError

    def state(self, transfer: str) -> m.TransferState:
        """How a transfer stands now."""
        raise NotImplementedError

    def finish(self, transfer: str, state: str, tokens: int = 0) -> None:
        """It has ended (`complete`, `failed`, `aborted`): what was set aside and not used is free again. Idempotent."""
        raise NotImplementedError

    def let_go(self, transfer: str) -> None:
        """A look-up has leased what has arrived, or nobody wants it: hold it no longer. Idempotent."""
        raise NotImplementedError


class Outgoing:
    """Transfers from this node."""

    def send(
        self, transfer: str, address: str, namespace: bytes, digests: Sequence[bytes], tokens: int, *, final: bool
    ) -> None:
        """Push these chunks (and the tail) to the node at `address`, each as soon as it is READY here.

        May be called again with more digests, in the order of the prompt. Returns at once; what comes of it is in
        `state`.

        Args:
            transfer: its name, as the proxy made it.
            address: the decode node's peer port, `host:port`.
            namespace: of all of them; registered here.
            digests: what is known by now, without those of earlier calls.
            tokens: of the whole request, for the admission.
            final: nothing more will be announced. When all is there the transfer is finished.
        """
        raise NotImplementedError

    def state(self, transfer: str) -> m.TransferState:
        """How it stands: `open`, `complete`, `failed`, `aborted`, `unknown`; `tokens` is what has arrived in front."""
        raise NotImplementedError

    def abort(self, transfer: str) -> None:
        """The request has gone: stop pushing, tell the decode node. Idempotent."""
        raise NotImplementedError
