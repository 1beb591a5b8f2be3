"""Which frames are there: by a request each or by listings; and how they go."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from s3_rig import client

from lmkv.errors import BackendError
from lmkv.testing import make_key, make_memory
from lmkv.testing.material import OTHER_NAMESPACE
from lmkv_backend_s3 import listing
from lmkv_backend_s3.names import Names

if TYPE_CHECKING:
    from fake_s3 import FakeS3, Seen
    from s3_place import Open, Place

MANY = 2 * listing.HEADS_PER_PAGE


def kinds(fake: FakeS3) -> list[str]:
    """What was asked, in order."""
    return ["LIST" if "list-type" in seen.target else seen.method for seen in fake.seen]


def fill(fake: FakeS3, numbers: range) -> None:
    for n in numbers:
        fake.objects[f"frames/{make_key(n)}"] = b"x"


def test_few_keys_are_asked_for_one_by_one(fake: FakeS3, open_s3: Open) -> None:
    s3 = open_s3(fake)
    fill(fake, range(0, 10, 2))
    fake.seen.clear()
    assert list(s3.contains([make_key(n) for n in range(10)])) == [True, False] * 5
    assert kinds(fake) == ["HEAD"] * 10


def test_many_keys_are_listed(fake: FakeS3, open_s3: Open) -> None:
    s3 = open_s3(fake)
    fill(fake, range(0, MANY, 2))
    fake.seen.clear()
    assert list(s3.contains([make_key(n) for n in range(MANY)])) == [True, False] * (MANY // 2)
    assert kinds(fake) == ["LIST"]


@pytest.mark.parametrize("express", [False, True])
def test_a_listing_that_would_take_too_long_is_given_up(
    place: Place, open_s3: Open, monkeypatch: pytest.MonkeyPatch, express: bool
) -> None:
    """What it told is used: where listings are in order also about what is not there. Then it is left for a while."""
    monkeypatch.setattr(listing, "PAGE", 20)
    s3 = open_s3(place)
    s3._listing._sorted = not express
    wanted = [make_key(n) for n in range(MANY)]
    s3.put(wanted[::2], [make_memory(b"x")] * (MANY // 2))
    asked: list[str] = []
    plain, look = s3._bucket.ask, s3._bucket.exists

    def ask(operation: str, *args: object, **params: object) -> object:
        asked.append(operation)
        return plain(operation, *args, **params)  # type: ignore[arg-type]

    def exists(*args: object) -> object:
        asked.append("head_object")
        return look(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(s3._bucket, "ask", ask)
    monkeypatch.setattr(s3._bucket, "exists", exists)
    assert list(s3.contains(wanted)) == [True, False] * (MANY // 2)
    pages = MANY // listing.HEADS_PER_PAGE
    assert asked.count("list_objects_v2") == pages
    told = sorted(s3._names.frame(key) for key in wanted[::2])[: pages * 20]
    decided = len(told) if express else sum(s3._names.frame(key) <= told[-1] for key in wanted)
    assert asked.count("head_object") == MANY - decided
    asked.clear()
    assert list(s3.contains(wanted)) == [True, False] * (MANY // 2)
    assert set(asked) == {"head_object"}


def test_the_cheaper_way_is_learnt(fake: FakeS3, open_s3: Open) -> None:
    """A store whose listings are slow is asked for each key, though there are many; and the other way round."""
    s3 = open_s3(fake)
    fill(fake, range(MANY))
    keys = [make_key(n) for n in range(MANY)]
    fake.script = lambda seen: time.sleep(1.0) if "list-type" in seen.target else None
    for _ in range(2):
        s3.contains(keys[: listing.FEWEST_MEASURED])
        s3.contains(keys)
    fake.seen.clear()
    assert all(s3.contains(keys[: MANY // 2]))
    assert set(kinds(fake)) == {"HEAD"}
    fake.script = lambda seen: time.sleep(0.2) if seen.method == "HEAD" else None
    for _ in range(4):
        s3.contains(keys[:20])
    fake.script = lambda _: None
    s3._listing._prices.saw_page(0.001)
    for _ in range(10):
        next(s3._listing.objects(s3._names.frames))
    fake.seen.clear()
    assert all(s3.contains(keys[: MANY // 3]))
    assert kinds(fake) == ["LIST"]


def test_every_namespace_and_shard_is_looked_at(place: Place, open_s3: Open) -> None:
    s3 = open_s3(place)
    keys = [make_key(n, shard=n % 2) for n in range(2 * MANY)]
    keys += [make_key(n, namespace=OTHER_NAMESPACE) for n in range(5)]
    there = [n % 3 == 0 for n in range(len(keys))]
    some = [key for key, here in zip(keys, there, strict=True) if here]
    s3.put(some, [make_memory(b"x")] * len(some))
    assert list(s3.contains(keys)) == there
    assert list(s3.contains(keys + keys[:2])) == [*there, *there[:2]]


def test_not_knowing_is_not_a_no(fake: FakeS3, open_s3: Open) -> None:
    s3 = open_s3(fake, deadline=1.0)
    for number in (3, MANY):
        fake.script = lambda _: (503, "SlowDown")
        with pytest.raises(BackendError, match="busy"):
            s3.contains([make_key(n) for n in range(number)])


def test_scan_pages_through_what_is_ours(place: Place, open_s3: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", 7)
    s3 = open_s3(place)
    keys = [make_key(n, shard=n % 3) for n in range(25)]
    s3.put(keys, [make_memory(b"x" * (n + 1)) for n in range(25)])
    s3.describe(keys[0].namespace, "{}")
    back = client(place.server)
    back.put_object(Bucket=place.bucket, Key=f"{s3._names.frames}not/ours", Body=b"")
    found = list(s3.scan())
    assert {frame.key: frame.nbytes for frame in found} == {key: n + 1 for n, key in enumerate(keys)}
    assert [f.last_used for f in found] == sorted(f.last_used for f in found)
    assert all(time.time() - 600 < f.last_used < time.time() + 600 for f in found)
    s3.clear()
    assert list(s3.scan()) == []
    left = [e["Key"] for e in back.list_objects_v2(Bucket=place.bucket, Prefix=s3._options.prefix)["Contents"]]
    left = [name for name in left if not name.endswith("/")]  # JuiceFS shows its empty folders
    back.close()
    assert sorted(left) == sorted([f"{s3._names.frames}not/ours", s3._names.description(keys[0].namespace)])


def test_removals_in_batches_and_one_by_one(fake: FakeS3, open_s3: Open) -> None:
    """Where the store does not take batches, each goes alone, and batches are not tried again."""
    s3 = open_s3(fake)
    for refusing in (False, True):
        fill(fake, range(50))
        fake.seen.clear()
        code = "MissingContentMD5" if refusing else ""
        fake.script = lambda seen, code=code: (400, code) if code and seen.method == "POST" else None
        s3.delete([make_key(n) for n in range(40)])
        assert len(fake.objects) == 10
        assert fake.counts == ({"POST": 1, "DELETE": 40} if refusing else {"POST": 1})
    assert fake.seen[0].headers["content-md5"]
    fake.seen.clear()
    s3.delete([make_key(n) for n in range(40, 50)])
    assert fake.counts == {"DELETE": 10}


def test_a_refused_removal_is_told(fake: FakeS3, open_s3: Open) -> None:
    s3 = open_s3(fake)

    def script(seen: Seen) -> tuple[int, str] | None:
        return (403, "AccessDenied") if seen.method in {"POST", "DELETE"} else None

    fake.script = script
    for number in (1, 10):
        with pytest.raises(BackendError, match="AccessDenied"):
            s3.delete([make_key(n) for n in range(number)])


def test_names() -> None:
    names = Names("a/b=1/")
    key = make_key(7, shard=31)
    assert names.frame(key) == f"a/b=1/frames/{key.namespace.hex()}/1f/{key.digest.hex()}"
    assert names.frame(key).startswith(names.folder(key.namespace, 31))
    assert names.parse(names.frame(key)) == key
    for other in ("", "frames/x", names.frame(key) + "x", names.frame(key)[2:], names.description(key.namespace)):
        assert names.parse(other) is None


def test_what_a_namespace_stands_for(fake: FakeS3, open_s3: Open) -> None:
    s3 = open_s3(fake)
    fake.seen.clear()
    for _ in range(2):
        s3.describe(make_key(1).namespace, '{"model": "ä"}')
    assert fake.objects[f"namespaces/{make_key(1).namespace.hex()}.json"].decode() == '{"model": "ä"}'
    assert fake.counts == {"PUT": 1}, "once for each text"
