"""From a chain of digests to what is asked and stored; checks of what a caller hands in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv.errors import ConfigError
from lmkv.service.protocol import NewFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lmkv.keys import KeyChain


def frame_of(chain: KeyChain, index: int) -> NewFrame:
    """Full chunk number `index` of a chain, as it is reserved."""
    prefixes = chain.prefixes(index)
    pages = chain.chunk_tokens // chain.page_tokens
    return NewFrame(chain.digests[index], chain.parent(index), pages, b"".join(prefixes[: pages - 1]))


def tail_of(chain: KeyChain) -> NewFrame | None:
    """The whole pages after the last full chunk, as they are reserved; None when there is not one."""
    index = len(chain.digests)
    prefixes = chain.prefixes(index)
    if not prefixes:
        return None
    return NewFrame(prefixes[-1], chain.parent(index), len(prefixes), b"".join(prefixes[:-1]))


def digests_of(chain: KeyChain) -> bytes:
    """Digests of all full chunks and, if it has a page, of the tail: what pin, move and their like name."""
    return b"".join([*chain.digests, *chain.prefixes(len(chain.digests))[-1:]])


def token_array(tokens: Sequence[int] | NDArray[Any]) -> NDArray[np.uint32]:
    """Token ids as one array.

    Raises:
        ConfigError: they are not one row of integers from 0 to 2**32-1.
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"tokens must be one row of integers, got {array.dtype} of shape {array.shape}", kind="input")
    if array.dtype != np.uint32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << 32:
            raise ConfigError(f"token ids must lie in 0 … 2**32-1, got {low} … {high}", kind="input")
    return array.astype(np.uint32, copy=False)


def page_array(page_ids: Sequence[int] | NDArray[Any], tokens: int, page_tokens: int) -> NDArray[np.int64]:
    """Page ids as one array; entry p holds tokens `[p * page_tokens, (p + 1) * page_tokens)`.

    Raises:
        ConfigError: they are not one row of non-negative integers, or not as many as the tokens have pages (the last
            page, if only begun, may be left out).
    """
    array = np.asarray(page_ids)
    if array.size == 0:
        array = np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"page_ids must be one row of integers, got {array.dtype} of shape {array.shape}", kind="input"
        )
    whole, begun = tokens // page_tokens, -(-tokens // page_tokens)
    if not whole <= array.size <= begun:
        raise ConfigError(
            f"{array.size} page ids for {tokens} tokens of {page_tokens} per page: expected "
            + (f"{whole}" if whole == begun else f"{whole} or {begun}"),
            kind="input",
        )
    if array.size and int(array.min()) < 0:
        raise ConfigError(f"page ids must not be negative, got {int(array.min())}", kind="input")
    return array.astype(np.int64, copy=False)


def masked_out(mask: Sequence[bool] | NDArray[Any] | None, tokens: int, page_tokens: int) -> int:
    """Tokens of the False prefix of a mask; 0 without a mask.

    Raises:
        ConfigError: the mask is not one bool per token, False first and then True, or its False part is not a whole
            number of pages.
    """
    if mask is None:
        return 0
    array = np.asarray(mask)
    if array.size == 0:
        array = np.empty(0, np.bool_)
    if array.shape != (tokens,) or array.dtype != np.bool_:
        raise ConfigError(
            f"a mask must have one bool for each of the {tokens} tokens, got {array.dtype} of shape {array.shape}",
            kind="input",
        )
    wanted = int(np.count_nonzero(array))
    skip = tokens - wanted
    if not array[skip:].all():
        raise ConfigError("a mask must be False for a prefix and True for the rest (FFFFTTTT)", kind="input")
    if wanted and skip % page_tokens:
        raise ConfigError(
            f"the False part of the mask has {skip} tokens, which is no whole number of pages of {page_tokens}: "
            f"round it down to {skip - skip % page_tokens}",
            kind="input",
        )
    return skip
