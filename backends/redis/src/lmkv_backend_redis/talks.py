"""What is said to a server about frames: put, get, contains, delete. Each is one pipelined exchange on one channel."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from lmkv.errors import BackendError, FrameError
from lmkv.types import FAILED, MISS, OK, Outcome
from lmkv_backend_redis.channel import ReplyError
from lmkv_backend_redis.layout import HEAD, PARTS_MAX, Head, new_head, parse_head, stride, temporary, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmkv.memory import MemoryObject
    from lmkv_backend_redis.channel import Argument, Channel, Reply

UNPUBLISHED_SECONDS: Final = 60
"""What a killed writer leaves behind is gone after that."""
WINDOW: Final = 3 << 20
"""Bytes sent or asked for ahead: enough to keep the server busy, few enough that they stay in its caches."""
AT_LEAST: Final = 2
"""Parts ahead where single ones exceed the window."""
_SMALL: Final = 64
"""Bytes that a reply counts for which carries no part."""
_FIRST, _LAST, _EXTEND = -1, -2, -3
"""Questions about a frame that are not for a part."""
ILL: Final = frozenset(
    {"NOAUTH", "WRONGPASS", "NOPERM", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "BUSY", "NOREPLICAS", "READONLY"}
)
"""Refusals that say something about the store, not about one frame."""
ELSEWHERE: Final = frozenset({"MOVED", "ASK"})
"""The key is on another node of the cluster."""


def put(
    channel: Channel, names: Sequence[bytes], views: Sequence[memoryview], part_bytes: int, ttl: float | None
) -> list[Outcome]:
    """Write frames under temporary names and rename each when it is whole."""
    heads = [new_head(len(view), part_bytes) for view in views]
    replies: list[list[Reply]] = [[] for _ in names]
    under_way: deque[tuple[int, int]] = deque()
    ahead = 0
    for index, (name, view, head) in enumerate(zip(names, views, heads, strict=True)):
        for nbytes, command in _writing(name, view, head, ttl):
            channel.send(*command)
            under_way.append((index, nbytes))
            ahead += nbytes
            while ahead > WINDOW and len(under_way) > AT_LEAST:
                oldest, nbytes_there = under_way.popleft()
                replies[oldest].append(channel.reply())
                ahead -= nbytes_there
    for index, _ in under_way:
        replies[index].append(channel.reply())
    return _published(channel, names, heads, replies)


def _writing(name: bytes, view: memoryview, head: Head, ttl: float | None) -> Iterator[tuple[int, Sequence[Argument]]]:
    """The commands that write a frame, each with the bytes of the frame in it."""
    temp = temporary(name, head)
    for part in range(head.parts):
        begin, nbytes = part * head.stride, head.size(part)
        data = view[begin : begin + nbytes]
        if part:
            yield nbytes, (b"HSET", temp, b"%d" % part, data)
        else:
            yield nbytes, (b"HSET", temp, HEAD, head.pack(), b"0", data)
            yield 0, (b"PEXPIRE", temp, milliseconds(UNPUBLISHED_SECONDS if ttl is None else ttl))
    yield 0, (b"HLEN", temp)
    yield 0, ((b"PERSIST", temp) if ttl is None else (b"PEXPIRE", temp, milliseconds(ttl)))
    yield 0, (b"RENAME", temp, name)


def _published(
    channel: Channel, names: Sequence[bytes], heads: Sequence[Head], said: Sequence[Sequence[Reply]]
) -> list[Outcome]:
    """What the replies to all the commands of each frame mean; what is left of those that failed is removed."""
    outcomes: list[Outcome] = []
    remains: list[bytes] = []
    for name, head, replies in zip(names, heads, said, strict=True):
        refusals = [reply for reply in replies if isinstance(reply, ReplyError)]
        whole = replies[-3] == head.parts + 1
        if whole and not refusals:
            outcomes.append(OK(head.nbytes))
            continue
        renamed = not isinstance(replies[-1], ReplyError)
        remains.append(name if renamed else temporary(name, head))
        lost = BackendError("the server dropped a part of the frame while it was being written", kind="no-space")
        outcomes.append(FAILED(_refusal(refusals[0]) if refusals else lost))
    delete(channel, remains)
    return outcomes


class _Reading:
    """One frame on its way into memory."""

    def __init__(self, name: bytes, memory: MemoryObject, guess: int) -> None:
        self.name = name
        self.memory = memory
        self.view = view = memory.view
        self.stride = guess
        self.count = max(1, -(-len(view) // guess))
        """Parts to ask for: a guess until the head has come."""
        self.first: Reply = None
        self.head: Head | None = None
        self.outcome: Outcome | None = None
        self.asked = 0
        self.parts = 0
        self.doomed = False
        self.again = False
        """It has more parts than were asked for before its head came: others store in smaller parts than we do."""

    def size(self, part: int) -> int:
        """Bytes that the reply is likely to have."""
        return _SMALL + (0 if part < 0 else min(self.stride, max(0, len(self.view) - part * self.stride)))

    def begin(self, reply: Reply) -> None:
        """The head."""
        self.first = reply
        if isinstance(reply, ReplyError):
            self.fail(_refusal(reply))
            return
        self.head = head = parse_head(reply)
        if reply is not None and head is None:
            self.fail(FrameError("what is stored under the name of the frame has no head that makes sense"))
        elif head is not None and head.nbytes > len(self.view):
            self.fail(BackendError(f"the frame has {head.nbytes} bytes, the buffer {len(self.view)}", kind="size"))
        elif head is not None:
            self.count, self.stride = head.parts, head.stride
        if self.outcome is not None or head is None:
            self.count = 1

    def room(self, part: int) -> memoryview:
        """Where a part goes; nowhere if it is of no use."""
        if self.head is None or self.outcome is not None or part >= self.head.parts:
            return self.view[:0]
        begin = part * self.stride
        return self.view[begin : begin + self.head.size(part)]

    def take(self, part: int, nbytes: int | ReplyError | None) -> None:
        """A part has come, or not."""
        head = self.head
        if isinstance(nbytes, ReplyError):
            if self.outcome is None:
                self.fail(_refusal(nbytes))
        elif nbytes is not None and head is None and self.first is None:
            self.doomed = True  # parts without a head
        elif head is None or part >= head.parts or self.outcome is not None:
            return
        elif nbytes is None:
            self.doomed = True
        elif nbytes != head.size(part):
            self.fail(FrameError(f"part {part} of {head.parts} has {nbytes} bytes instead of {head.size(part)}"))
        else:
            self.parts += 1
            if self.parts == part + 1:
                self.memory.landed(part * head.stride + nbytes)

    def end(self, reply: Reply) -> None:
        """The head once more: nobody has replaced the frame meanwhile."""
        if isinstance(reply, ReplyError):
            self.outcome = self.outcome or FAILED(_refusal(reply))
        same = reply == self.first
        self.doomed = self.doomed and same
        if self.outcome is None:
            self.again = same and self.head is not None and self.head.parts > self.asked
            whole = same and self.head is not None and self.parts == self.head.parts
            self.outcome = OK(self.head.nbytes) if whole and self.head is not None else MISS
        elif not same and isinstance(self.outcome.error, FrameError):
            self.outcome = MISS  # two frames mixed, none of them damaged

    def fail(self, error: BaseException) -> None:
        """For a reason of its own."""
        self.outcome = FAILED(error)


def get(
    channel: Channel,
    names: Sequence[bytes],
    into: Sequence[MemoryObject],
    part_bytes: int,
    ttl: float | None = None,
) -> list[Outcome]:
    """Read frames; `ttl`: and begin their time anew. Frames of which a part is lost are a miss, and deleted."""
    readings = [_Reading(name, memory, stride(part_bytes)) for name, memory in zip(names, into, strict=True)]
    _read(channel, readings, ttl)
    for index, first in enumerate(readings):
        if first.again and first.head is not None:
            readings[index] = _Reading(first.name, first.memory, first.head.stride)
            _read(channel, readings[index : index + 1], ttl)
    delete(channel, [reading.name for reading in readings if reading.doomed])
    return [reading.outcome or MISS for reading in readings]


def _read(channel: Channel, readings: Sequence[_Reading], ttl: float | None) -> None:
    """Ask for frames, a window of bytes ahead, and take what comes."""
    todo = _questions(readings, () if ttl is None else (_EXTEND,))
    asked: deque[tuple[_Reading, int, int]] = deque()
    ahead = 0
    more = True
    while more or asked:
        while more and (ahead < WINDOW or len(asked) < AT_LEAST):
            reading, what = next(todo, (None, _LAST))
            if reading is None:
                more = False
                break
            if what == _EXTEND:
                assert ttl is not None, "asked for only where there is one"
                channel.send(b"PEXPIRE", reading.name, milliseconds(ttl))
            else:
                channel.send(b"HGET", reading.name, HEAD if what < 0 else b"%d" % what)
            asked.append((reading, what, reading.size(what)))
            ahead += asked[-1][2]
        if asked:
            reading, what, size = asked.popleft()
            _answer(channel, reading, what)
            ahead -= size


def _questions(readings: Sequence[_Reading], extra: Sequence[int]) -> Iterator[tuple[_Reading | None, int]]:
    """Head, parts, head again of each frame. Asked lazily: the head tells how many parts there are."""
    for reading in readings:
        yield reading, _FIRST
        part = 0
        while part < reading.count:
            yield reading, part
            part += 1
            reading.asked = part
        yield reading, _LAST
        for each in extra:
            yield reading, each


def _answer(channel: Channel, reading: _Reading, what: int) -> None:
    if what >= 0:
        reading.take(what, channel.reply_into(reading.room(what)))
    elif what == _FIRST:
        reading.begin(channel.reply())
    elif what == _LAST:
        reading.end(channel.reply())
    else:
        _passed(channel.reply())


def ask_contains(channel: Channel, names: Sequence[bytes]) -> None:
    """The question, without waiting for the answer, so that several servers can be asked at once."""
    channel.send_for_each(names, b"HGET", HEAD)
    channel.send_for_each(names, b"HLEN")
    channel.flush()


def answer_contains(channel: Channel, names: Sequence[bytes]) -> list[bool | ReplyError]:
    """Whether head and all parts are there; what is refused is told."""
    heads, fields = channel.replies(len(names)), channel.replies(len(names))
    found: list[bool | ReplyError] = [*whole(heads, fields)]
    for index, head in enumerate(heads):
        if isinstance(head, ReplyError):
            _refusal(head)
            found[index] = head
    return found


def delete(channel: Channel, names: Sequence[bytes]) -> list[Reply]:
    """Remove keys; memory is freed in the background."""
    channel.send_for_each(names, b"UNLINK")
    return [_passed(channel.reply()) for _ in names]


def touch(channel: Channel, names: Sequence[bytes]) -> list[Reply]:
    """Note a use, for the server's own order of eviction."""
    channel.send_for_each(names, b"TOUCH")
    return [_passed(channel.reply()) for _ in names]


def touch_together(channel: Channel, names: Sequence[bytes]) -> list[Reply]:
    """As `touch` in a single command, for servers that have all the keys."""
    if not names:
        return []
    channel.send(b"TOUCH", *names)
    return [_passed(channel.reply())] * len(names)


def extend(channel: Channel, names: Sequence[bytes], ttl: float) -> list[Reply]:
    """Begin the time of keys anew, which also notes a use."""
    channel.send_for_each(names, b"PEXPIRE", milliseconds(ttl))
    return [_passed(channel.reply()) for _ in names]


def largest(part_bytes: int) -> int:
    """Bytes of the largest frame: one with as many parts as anybody reads."""
    return PARTS_MAX * stride(part_bytes)


def milliseconds(seconds: float) -> bytes:
    """For `PEXPIRE`; at least one."""
    return b"%d" % max(1, round(seconds * 1000))


def _refusal(reply: ReplyError) -> BackendError:
    """The error of one frame; raised when it is about the whole store."""
    if reply.code in ILL:
        raise reply
    if reply.code == "OOM":
        text = f"the store is full ({reply}); give it a maxmemory-policy such as allkeys-lru"
        return BackendError(text, kind="no-space")
    return reply


def _passed(reply: Reply) -> Reply:
    if isinstance(reply, ReplyError):
        _refusal(reply)
    return reply
