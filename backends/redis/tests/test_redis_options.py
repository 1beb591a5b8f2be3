"""URLs and fields: what they mean, what is refused, what is never shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from lmkv.config.faults import submodel
from lmkv.specs import BackendContext
from lmkv.units import shown
from lmkv_backend_redis.options import RedisOptions, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

    from lmkv_backend_redis.options import TLSOptions

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "backend-redis.md"


def target(**options: Any) -> Target:
    return RedisOptions.model_validate(options).target


def password(found: Target) -> str | None:
    return None if found.password is None else found.password.get_secret_value()


def faults(**options: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        RedisOptions.model_validate(options)
    return "\n".join(error["msg"] for error in caught.value.errors(include_input=False))


URLS: dict[str, tuple[str, tuple[tuple[str, int], ...], str | None, str | None, int, bool]] = {
    "redis://cache.example": ("server", (("cache.example", 6379),), None, None, 0, False),
    "rediss://cache.example:7000/15": ("server", (("cache.example", 7000),), None, None, 15, True),
    "redis://kv:p%40%3A%2F%25%23@h/2": ("server", (("h", 6379),), "kv", "p@:/%#", 2, False),
    "redis://:p%C3%A4ss@h": ("server", (("h", 6379),), None, "päss", 0, False),
    "rediss://[2001:db8::1]:7000": ("server", (("2001:db8::1", 7000),), None, None, 0, True),
    "redis://kv:x@[::1]/1": ("server", (("::1", 6379),), "kv", "x", 1, False),
    "redis+cluster://a,b:7001,[::2]:7002": ("cluster", (("a", 6379), ("b", 7001), ("::2", 7002)), None, None, 0, False),
}


@pytest.mark.parametrize("url", URLS)
def test_urls(url: str) -> None:
    kind, addresses, user, secret, db, tls = URLS[url]
    found = target(url=url)
    assert (found.kind, found.addresses, found.username, password(found)) == (kind, addresses, user, secret)
    assert (found.db, found.tls is not None) == (db, tls)


def test_socket_url() -> None:
    found = target(url="unix://kv:a%20b@/run/redis%20here.sock?db=4")
    assert (found.kind, found.socket, found.db) == ("socket", "/run/redis here.sock", 4)
    assert (found.username, password(found), found.addresses) == ("kv", "a b", ())


def test_fields_say_the_same() -> None:
    assert target(host="::1", port=7, password="x", db=2) == target(url="redis://:x@[::1]:7/2")
    fields = target(sentinels=["a", "b:1"], service="kv", username="u", password="p", tls={})
    assert fields == target(url="rediss+sentinel://u:p@a,b:1/kv")
    assert target(cluster=["a:1", "b"]) == target(url="redis+cluster://a:1,b")


def test_url_and_fields_complete_each_other() -> None:
    found = target(url="rediss://kv@h", password="secret word", tls={"verify": "chain"}, db=3)
    assert (found.username, password(found), found.db) == ("kv", "secret word", 3)
    assert found.tls is not None
    assert found.tls.verify == "chain"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "where the store is"),
    "two ways": ({"host": "a", "cluster": ["b"]}, "host and cluster"),
    "another db": ({"url": "redis://h/1", "db": 2}, "db: contradicts the url"),
    "another password": ({"url": "redis://:hunter22@h", "password": "hunter23"}, "password: contradicts the url"),
    "another host": ({"url": "redis://h", "host": "g"}, "host: contradicts the url"),
    "another way": ({"url": "redis://h", "socket": "/s"}, "socket: contradicts the url"),
    "tls or not": ({"url": "redis://h", "tls": {}}, "tls: contradicts the url"),
    "cluster with db": ({"url": "redis+cluster://h", "db": 1}, "database 0 only"),
    "sentinel without service": ({"sentinels": ["h"]}, "need the name of the service"),
    "service without sentinel": ({"host": "h", "service": "kv"}, "for sentinels only"),
    "socket with tls": ({"socket": "/s", "tls": {}}, "not spoken on a unix socket"),
    "user alone": ({"host": "h", "username": "kv"}, "password: the user has none"),
    "sliding alone": ({"host": "h", "sliding": True}, "no ttl"),
    "prefix of two": ({"host": "h", "prefix": "a:b"}, "pattern"),
    "part too small": ({"host": "h", "part_bytes": 10}, "from 1KiB to 512MiB"),
    "cert alone": ({"host": "h", "tls": {"cert": "/c"}}, "cert and key go together"),
    "relative socket": ({"socket": "run/s"}, "relative"),
    "long socket": ({"socket": "/" + "s" * 107}, "too long"),
    "scheme": ({"url": "http://h"}, "is no URL of a Redis"),
    "bare at": ({"url": "redis://kv:hunt@er22@h"}, "%40"),
    "bare colon": ({"url": "redis://kv:hunt:er22@h"}, "%3A"),
    "bare hash": ({"url": "redis://kv:hunt#er22@h"}, "%23"),
    "bare slash": ({"url": "redis://kv:hunt/er22@h"}, "%2F"),
    "bare percent": ({"url": "redis://kv:hunt%er22@h"}, "%25"),
    "not unicode": ({"url": "redis://kv:hunter22%ff@h"}, "UTF-8"),
    "password without host": ({"url": "redis://hunter22:x"}, "proper host:port"),
    "query": ({"url": "redis://:hunter22@h?ssl=true"}, "only unix://"),
    "path": ({"url": "redis://:hunter22@h/1/hunter22"}, "database number"),
    "url as host": ({"host": "redis://kv:hunter22@h"}, "is no address but a URL"),
    "login in host": ({"host": "kv:hunter22@h"}, "is no address but a URL"),
    "url among nodes": ({"cluster": ["h", "redis://kv:hunter22@h:1"]}, "is no address but a URL"),
    "login among sentinels": ({"sentinels": [":hunter22@h:1"], "service": "kv"}, "is no address but a URL"),
    "url as socket": ({"socket": "unix://kv:hunter22@/s"}, "or a URL"),
    "bare ipv6": ({"host": "h", "url": None, "cluster": ["::1"]}, "brackets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    options, said = REFUSED[case]
    text = faults(**options)
    assert said in text
    assert "hunt" not in text
    with pytest.raises(ValidationError) as caught:
        RedisOptions.model_validate(options)
    assert "hunt" not in str(caught.value)


def test_a_url_is_shown_without_its_password() -> None:
    options = RedisOptions.model_validate({"url": "redis://kv:hunter22@h:1/2"})
    assert str(options.url) == "redis://kv:**********@h:1/2"
    assert options.url is not None
    assert options.url.get_secret_value() == "redis://kv:hunter22@h:1/2"
    for text in (repr(options), str(options), options.model_dump_json(), str(options.target), repr(options.target)):
        assert "hunter22" not in text


def test_secrets_come_from_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORE", "redis://:from%20env@h")
    (tmp_path / "secret").write_text("from a file\n")
    assert password(target(url={"env": "STORE"})) == "from env"
    assert password(target(host="h", password={"file": str(tmp_path / "secret")})) == "from a file"


def test_files_of_tls_are_looked_at(tmp_path: Path) -> None:
    options = RedisOptions.model_validate({"host": "h", "tls": {"ca": tmp_path / "ca.pem"}})
    (fault,) = options.check(BackendContext(tier="far"))
    assert "ca.pem" in fault
    assert "Errno 2" in fault
    tls: TLSOptions | None = options.tls
    assert tls is not None


def lines(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        default = (
            "none" if field.default in (None, ()) else f"`{shown(field.default, (*field.metadata, field.annotation))}`"
        )
        yield f"| `{above}{name}` | {default} | {field.description} |"
        inner = submodel(field.annotation)
        if inner is not None:
            yield from lines(inner, f"{above}{name}.")


def test_the_page_has_every_option() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| option | default | meaning |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    assert table.splitlines() == list(lines(RedisOptions))
