"""Metrics, their page, and logs."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmkv.errors import ConfigError
from lmkv.observe import Metrics, RateLimited, serve_metrics, set_up
from lmkv.observe.clients import OTHER, Clients, Who
from lmkv.observe.families import FAMILIES
from lmkv.observe.log import mask

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_counters_and_labels() -> None:
    metrics = Metrics()
    metrics.inc("lmkv_misses_total", reason="evicted", model="m", rank="0")
    metrics.inc("lmkv_misses_total", 2, reason="corrupt", model="m", rank="0")
    metrics.inc("lmkv_tier_bytes_total", 10, tier="ram", op="get")
    metrics.inc("lmkv_tier_bytes_total", 5, op="get", tier="ram")
    bound = metrics.counter("lmkv_tier_bytes_total", tier="ram", op="get")
    bound.inc(1)
    assert metrics.value("lmkv_misses_total") == 3
    assert metrics.value("lmkv_misses_total", reason="evicted") == 1
    assert metrics.value("lmkv_misses_total", reason="expired") == 0
    assert metrics.snapshot()['lmkv_tier_bytes_total{op="get",tier="ram"}'] == 16
    assert metrics.undocumented() == []
    metrics.inc("lmkv_something_total")
    metrics.inc("lmkv_lookups_total", tier="ram")
    assert metrics.undocumented() == ['lmkv_lookups_total{tier="ram"}', "lmkv_something_total"]


def test_a_clients_labels_are_safe() -> None:
    """Quotes, line ends, bytes that are no text, a password, a name without end: one short line, all the same."""
    metrics = Metrics()
    for model in ('a"b\\c\nd', "\udcff\x00", "s3://me:geheim@bucket/model", "/long/" + "x" * 5000 + "/the-end", ""):
        Clients(metrics).open(Who(model, "0", "engine")).inc("lmkv_lookups_total")
    lines = [line for line in metrics.render().splitlines() if not line.startswith("#")]
    assert len(lines) == 5
    assert all(len(line.encode()) < 300 for line in lines)
    assert "geheim" not in metrics.render()
    assert any(r'model="a\"b\\c?d"' in line for line in lines), lines
    assert any('/the-end"' in line for line in lines)
    assert any('model="unknown"' in line for line in lines)


def test_clients_series_are_bounded_and_their_sums_stay() -> None:
    metrics = Metrics()
    clients = Clients(metrics, most=8)
    resident = clients.open(Who("m", "0", "stays"))
    for number in range(100):
        engine = clients.open(Who("m", "0", f"engine {number}"))
        engine.inc("lmkv_lookups_total")
        engine.inc("lmkv_misses_total", 2, reason="evicted")
        again = clients.open(Who("m", "0", f"engine {number}"))
        engine.close()
        engine.close()
        again.inc("lmkv_lookups_total")
        again.close()
        resident.inc("lmkv_lookups_total")
    assert metrics.value("lmkv_lookups_total") == 300
    assert metrics.value("lmkv_lookups_total", instance="stays") == 100
    assert metrics.value("lmkv_lookups_total", instance="engine 99") == 2
    assert metrics.value("lmkv_lookups_total", instance="engine 94") == 2, "those that left first are added up"
    assert metrics.value("lmkv_lookups_total", instance=OTHER, model=OTHER) == 2 * 93
    assert metrics.value("lmkv_misses_total", reason="evicted") == 200
    assert len(metrics.snapshot()) == 2 * 9 - 1
    assert len(metrics._quick) < 20
    assert metrics.undocumented() == []
    crowd = [clients.open(Who("m", "0", f"at once {number}")) for number in range(20)]
    for engine in crowd:
        engine.inc("lmkv_lookups_total")
    assert metrics.value("lmkv_lookups_total") == 320
    assert metrics.value("lmkv_lookups_total", instance="at once 19") == 0, "all places are taken by others"
    assert len(metrics.snapshot()) <= 2 * 9


def test_what_cannot_be_counted() -> None:
    metrics = Metrics()
    metrics.inc("lmkv_lookups_total")
    metrics.observe("lmkv_tier_seconds", 0.1, tier="ram", op="get")
    for wrong in (
        lambda: metrics.inc("lmkv_lookups_total", -1),
        lambda: metrics.inc("no spaces"),
        lambda: metrics.inc("x", **{"1": "y"}),
        lambda: metrics.set("lmkv_lookups_total", 1),
        lambda: metrics.observe("lmkv_lookups_total", 1),
        lambda: metrics.inc("lmkv_tier_seconds", tier="ram", op="get"),
    ):
        with pytest.raises(ValueError, match=r"lmkv_|names are"):
            wrong()


def test_counting_from_many_threads() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(5000):
            metrics.inc("lmkv_misses_total", reason="evicted")
            metrics.observe("lmkv_tier_seconds", 0.001, tier="ram", op="get")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.render()
    assert metrics.value("lmkv_misses_total") == 20000
    assert metrics.value("lmkv_tier_seconds") == 20000


def test_prometheus_text() -> None:
    metrics = Metrics({"instance": 'a"b\\c\nd'})
    metrics.inc("lmkv_lookups_total", 3)
    metrics.set("lmkv_pool_bytes", 2**40)
    metrics.set("lmkv_leases", float("nan"))
    metrics.observe("lmkv_tier_seconds", 0.0005, tier="ram", op="get")
    metrics.observe("lmkv_tier_seconds", 99, tier="ram", op="get")
    lines = metrics.render().splitlines()
    labels = r'instance="a\"b\\c\nd"'
    assert "# TYPE lmkv_lookups_total counter" in lines
    assert "# HELP lmkv_lookups_total Look-ups, one per request." in lines
    assert f"lmkv_lookups_total{{{labels}}} 3" in lines
    assert f"lmkv_pool_bytes{{{labels}}} 1099511627776" in lines
    assert f"lmkv_leases{{{labels}}} nan" in lines
    series = f'{labels},op="get",tier="ram"'
    assert f'lmkv_tier_seconds_bucket{{{series},le="0.0001"}} 0' in lines
    assert f'lmkv_tier_seconds_bucket{{{series},le="0.0005"}} 1' in lines, "a bound belongs to its bucket"
    assert f'lmkv_tier_seconds_bucket{{{series},le="10.0"}} 1' in lines
    assert f'lmkv_tier_seconds_bucket{{{series},le="+Inf"}} 2' in lines
    assert f"lmkv_tier_seconds_count{{{series}}} 2" in lines
    assert f"lmkv_tier_seconds_sum{{{series}}} 99.0005" in lines
    assert Metrics().render() == ""


def test_page() -> None:
    metrics = Metrics()
    metrics.inc("lmkv_lookups_total", 3)
    page = serve_metrics(metrics, "localhost")
    try:
        with urllib.request.urlopen(page.url, timeout=5) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert b"lmkv_lookups_total 3" in answer.read()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(page.url.replace("metrics", "etc"), timeout=5)
        assert caught.value.code == 404
        caught.value.close()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1 port \d+: Address already in use"):
            serve_metrics(metrics, port=page.port)
    finally:
        page.close()
        page.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", page.port), timeout=5)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_page_stays_on_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match="not a loopback address"):
        serve_metrics(Metrics(), host)


def test_reference_page_lists_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.every_label) or "none"
        row = f"| `{family.name}` | {family.kind} | {labels} | {family.text} |"
        assert row in page.splitlines(), f"docs/reference/metrics.md lacks: {row}"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("lmkv")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def record(message: str, *, key: object = None, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord("lmkv.x", level, "f", 1, message, (), None)
    if key is not None:
        made.key = key
    return made


def test_repeats_are_limited_and_counted() -> None:
    now = 0.0
    limited = RateLimited(10.0, clock=lambda: now)
    assert [limited.filter(record("tier disk is open")) for _ in range(100)] == [True] + [False] * 99
    assert limited.filter(record("tier redis is open")), "another line"
    assert limited.filter(record("started", level=logging.INFO))
    assert limited.filter(record("started", level=logging.INFO)), "only warnings repeat without end"
    now = 12.0
    again = record("tier disk is open")
    assert limited.filter(again)
    assert again.getMessage() == "tier disk is open (99 more like this in the last 12 s)"
    assert limited.filter(record("took 1 ms", key="slow"))
    assert not limited.filter(record("took 2 ms", key="slow"))


def test_limiter_does_not_grow() -> None:
    limited = RateLimited()
    for number in range(5000):
        limited.filter(record(f"line {number}"))
    assert len(limited._seen) <= 1024


def test_text_lines(log: logging.Logger) -> None:
    stream = io.StringIO()
    set_up("info", stream=stream)
    log.getChild("storage").warning("lost %s", "redis://me:p@ss:w%40rd@host/0", extra={"tier": "redis", "key": "lost"})
    log.debug("not this")
    line = stream.getvalue()
    assert " WARNING lmkv.storage: lost redis://***@host/0 tier=redis\n" in line
    assert line.count("\n") == 1


def test_json_lines(log: logging.Logger) -> None:
    stream = io.StringIO()
    set_up("debug", "json", stream=stream)
    try:
        raise OSError("cannot reach http://user:geheim@host")  # noqa: TRY301
    except OSError:
        log.exception("ill", extra={"tier": "s3", "path": Path("x")})
    line = json.loads(stream.getvalue())
    assert (line["level"], line["logger"], line["message"], line["tier"]) == ("error", "lmkv", "ill", "s3")
    assert line["time"].endswith("Z")
    assert "OSError" in line["exception"]
    assert "geheim" not in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("rediss://user:a@b:c@host:1/2", "rediss://***@host:1/2"),
        ("http://host/a@b", "http://host/a@b"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("to x://:pw@h and y://u@h", "to x://***@h and y://***@h"),
    ],
)
def test_masking(text: str, masked: str) -> None:
    assert mask(text) == masked
