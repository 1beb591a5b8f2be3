"""How long a hit is believed: not longer than its lease holds, nor when the service is another by now."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from fake_vllm import FakeVLLM, Request, truth

from lmkv.errors import ConfigError
from lmkv.service.protocol import Lookup
from lmkv_vllm.epochs import check_lease
from lmkv_vllm.settings import Settings


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


class Asked:
    """Counts the look-ups of an engine."""

    def __init__(self, engine: FakeVLLM) -> None:
        self.count = 0
        connection = engine.links[0].client.connection()
        plain = connection.call

        def call(request: Any) -> Any:
            self.count += isinstance(request, Lookup)
            return plain(request)

        connection.call = call


def test_a_hit_waits_in_the_queue_longer_than_its_lease(rig: Any) -> None:
    """It is looked up anew, loaded, and counted once."""
    settings = Settings(lookup_deadline=10.0, load_deadline=2.0)
    engine = rig.engine(rig.host(leases={"seconds": "3s"}), settings=settings)
    engine.ask(tokens(21))
    before, computed = rig.counted(), engine.computed
    request = engine.add(Request("again", tokens(21), max_tokens=1))
    time.sleep(3.5)
    engine.run()
    engine.step()
    assert request.external == 20
    assert engine.computed - computed == 1
    assert request.output == truth(tokens(21), 1)
    rig.nothing_held()
    counted = rig.counted() - before
    assert counted.total("lmkv_lookups_total") == 1
    assert counted.total("lmkv_misses_total") == 0


def test_an_old_hit_of_nothing_is_asked_for_again_and_counted_once(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_vllm.epochs.HELD_SECONDS", 1.0)
    engine = rig.engine()
    before, asked = rig.counted(), Asked(engine)
    engine.add(Request("new", tokens(21)))
    time.sleep(1.5)
    engine.run()
    engine.step()
    rig.nothing_held()
    counted = rig.counted() - before
    assert asked.count == 2
    assert counted.total("lmkv_lookups_total") == 1
    assert counted.total("lmkv_misses_total") == 5


def test_a_young_hit_is_not_asked_for_again(rig: Any) -> None:
    engine = rig.engine()
    engine.ask(tokens(21))
    asked = Asked(engine)
    engine.ask(tokens(21))
    assert asked.count == 1


def test_a_hit_of_an_earlier_service_is_asked_for_again(rig: Any) -> None:
    """The service is replaced between arrival and turn: its successor may have given the same number to another."""
    engine = rig.engine()
    engine.ask(tokens(21))
    asked = Asked(engine)
    request = engine.add(Request("again", tokens(21)))
    connection = engine.links[0].client.connection()
    connection.welcome = msgspec.structs.replace(connection.welcome, incarnation=connection.welcome.incarnation + 1)
    engine.run()
    assert asked.count == 2
    assert request.output == truth(tokens(21), 3)


def test_leases_shorter_than_a_load_may_take(rig: Any) -> None:
    """Refused at the start, with the numbers: hits would be promised that nobody keeps."""
    with pytest.raises(ConfigError, match=r"end after 5 s.*leases.seconds.*at least 15s.*at most 3.33s"):
        rig.engine(rig.host(leases={"seconds": "5s"}))
    check_lease(15.0, 10.0)
    with pytest.raises(ConfigError):
        check_lease(14.9, 10.0)
