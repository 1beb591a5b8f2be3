"""Configuration: faults all at once, with places and nearest names; the environment; limits."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationInfo, model_validator

from lmkv.config import Config, Machine, json_schema, load_config
from lmkv.config.limits import Volume
from lmkv.config.memory import available_memory
from lmkv.errors import ConfigError
from lmkv.hookspecs import hookimpl
from lmkv.plugins import PluginHost
from lmkv.specs import BackendSpec
from lmkv.types import Capabilities
from lmkv.units import format_seconds, parse_seconds, parse_size

GIB = 1 << 30


class Empty(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PeerOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ports: list[int] = []
    password: SecretStr | None = None

    @model_validator(mode="after")
    def a_port_for_each_rank(self, info: ValidationInfo) -> PeerOptions:
        ranks = info.context["ranks"]
        if self.ports and len(self.ports) != ranks:
            raise ValueError(f"{len(self.ports)} ports for {ranks} ranks")
        return self


class FolderOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str
    fsync: str = "never"


class CheckedOptions(Empty):
    def check(self, context: Any) -> list[str]:
        return [f"tier {context.tier} of {context.capacity} bytes for {context.ranks} ranks is refused"]


def spec(name: str, options: type[BaseModel], **claims: bool) -> BackendSpec:
    factory = SimpleNamespace(capabilities=Capabilities(**claims))
    return BackendSpec(name=name, summary=name, options=lambda: options, load=lambda: factory)


SPECS = [
    spec("memory", Empty, resident=True),
    spec("folder", FolderOptions, persistent=True, scan=True),
    spec("peer", PeerOptions, shared=True),
    spec("checked", CheckedOptions),
]
SPECS.append(BackendSpec(name="opaque", summary="", options=lambda: Empty, load=lambda: print))
PLUGIN = SimpleNamespace(__name__="test-plugins", lmkv_backends=hookimpl(lambda: SPECS))


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.discover(extra=[PLUGIN])


def machine(memory: int = 16 * GIB, free: int = 1000 * GIB, used: int = 0) -> Machine:
    return Machine(memory, lambda path: Volume(1, free), lambda path: used // 2)


def faults(host: PluginHost, source: object, environ: dict[str, str] | None = None, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, host=host, environ=environ or {}, **more)
    assert all(fault.splitlines()[0] in str(caught.value) for fault in caught.value.faults)
    return list(caught.value.faults)


def test_a33_typos(host: PluginHost, tmp_path: Path) -> None:
    file = tmp_path / "stack.yaml"
    file.write_text(
        "ranks: 4\n"
        "chunk_sizee: 256\n"
        "pool:\n"
        "  size: 8GiB\n"
        "  staging: 5GBs\n"
        "tiers:\n"
        "  - backend: peer\n"
        "    options:\n"
        "      ports: [7000, 7001]\n"
    )
    found = faults(host, file, {"LMKV_POOL__SIE": "4GiB", "LMKV_CHUNK_TOKENS": "128"})
    assert len(found) == 4, found
    unknown_key, unit, ports, name = found
    assert unknown_key == f"{file}:2: chunk_sizee: unknown key (did you mean 'chunk_tokens'?)"
    assert unit.startswith(f"{file}:5: pool.staging: '5GBs' is not a size")
    assert "did you mean '5GB'?" in unit
    assert ports == f"{file}:8: tiers[0].options: 2 ports for 4 ranks"
    assert name == "environment LMKV_POOL__SIE: there is no such setting (did you mean 'LMKV_POOL__SIZE'?)"

    file.write_text(
        "ranks: 4\nchunk_tokens: 512\npool:\n  size: 8GiB\n"
        "tiers:\n  - backend: peer\n    options: {ports: [7000, 7001, 7002, 7003]}\n"
    )
    config = load_config(file, host=host, environ={"LMKV_CHUNK_TOKENS": "128"})
    assert config.chunk_tokens == 128, "the environment wins over the file"
    sources = {setting.path: (setting.value, setting.source) for setting in config.settings()}
    assert sources["chunk_tokens"] == ("128", "environment LMKV_CHUNK_TOKENS")
    assert sources["pool.size"] == ("8GiB", f"{file}:4")
    assert sources["tiers[0].deadline"] == ("2s", "default")


def test_a24_limits_add_up(host: PluginHost) -> None:
    text = (
        "ranks: 4\n"
        "pool: {size: 8GiB, per: rank}\n"
        "tiers:\n"
        "  - {backend: memory, capacity: 100%}\n"
        "  - backend: folder\n"
        "    capacity: 100GiB\n"
        "    evict: none\n"
        "    options: {path: frames}\n"
    )
    found = faults(host, text, name="stack.yaml", machine=machine(16 * GIB))
    assert found == [
        "stack.yaml:2: pool.size: 4 ranks x 8GiB = 32GiB, but 16GiB of memory is free on this machine",
        (
            "stack.yaml:7: tiers[1].evict: a capacity without an eviction policy fills up and then stores nothing: "
            "choose leaf-first-lru or lru"
        ),
    ]
    config = load_config(text.replace("    evict: none\n", ""), host=host, environ={})
    with pytest.raises(ConfigError, match=re.escape("4 ranks x 8GiB = 32GiB")):
        config.limits(machine(16 * GIB))
    limits = config.limits(machine(60 * GIB))
    assert limits.pool_bytes == 32 * GIB
    assert limits.staging_bytes == int(3.2 * GIB)
    assert limits.capacities == (limits.pool_bytes - limits.staging_bytes, 100 * GIB)
    assert limits.lines[0] == "pool: 4 ranks x 8GiB = 32GiB of 60GiB available; 3.2GiB kept for loads"


@pytest.mark.parametrize(
    ("tiers", "part"),
    [
        ("- {backend: memory}", "tiers[0].capacity: is required"),
        ("- {backend: memory, capacity: 8GiB}", "8GiB does not fit: 8GiB of pool less 819.2MiB for loads is 7.2GiB"),
        ("- {backend: folder, options: {path: x}}", "tiers[0].capacity: is required"),
        ("- {backend: folder, capacity: 50%, options: {path: x}}", "a percentage is of the pool"),
        ("- {backend: folder, capacity: 2TiB, options: {path: x}}", "2TiB, but 1000GiB is free on that file system"),
        ("- {backend: peer, capacity: 5GiB}", "tiers[0].capacity: has no effect"),
        ("- {backend: peer, evict: lru}", "tiers[0].evict: has no effect"),
        ("- {backend: checked, capacity: 1MiB}", "tier checked of 1048576 bytes for 1 ranks is refused"),
        ("- {backend: peer}\n- {backend: memory, capacity: 1GiB}", "must be the first tier"),
    ],
)
def test_capacities(host: PluginHost, tiers: str, part: str) -> None:
    [fault] = faults(host, f"pool: {{size: 8GiB}}\ntiers:\n{tiers}\n", machine=machine())
    assert part in fault


def test_capacity_of_a_backend_that_claims_nothing_yet(host: PluginHost) -> None:
    config = load_config("tiers:\n  - backend: opaque\n", host=host, environ={}, machine=machine())
    assert config.limits(machine()).capacities == (None,)


def test_capacities_on_one_file_system_are_added(host: PluginHost) -> None:
    tier = "- {{backend: folder, name: {0}, capacity: 600GiB, options: {{path: {0}}}}}\n"
    text = "tiers:\n" + tier.format("a") + tier.format("b")
    [fault] = faults(host, text, machine=machine(free=1000 * GIB))
    assert "600GiB + 600GiB = 1.17TiB" in fault
    assert "1000GiB is free" in fault
    load_config(text, host=host, environ={}, machine=machine(free=1000 * GIB, used=200 * GIB))


def test_no_file(host: PluginHost, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(host=host, environ={})
    with caplog.at_level(logging.WARNING, "lmkv"):
        limits = config.limits(machine(16 * GIB))
    assert limits.pool_bytes == 4 * GIB
    assert (config.chunk_tokens, config.tiers[0].name, config.tiers[0].backend) == (256, "ram", "cpu")
    assert "RAM tier of 3.6GiB (pool of 4GiB, of 16GiB available), chunks of 256 tokens" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("\n", "holds no settings"),
        ("# nothing\n", "holds no settings"),
        ("- a\n- b\n", "c:1: the whole file must be a mapping"),
        ("just words\n", "c:1: the whole file must be a mapping"),
        ("pool: {size: 1GiB\nranks: 1\n", "c:2: not valid YAML"),
        ("ranks: 1\n\tpool: 2\n", "c:2: not valid YAML"),
        ("ranks: 1\n---\nranks: 2\n", "c:2: not valid YAML"),
        ("ranks: 1\nranks: 2\n", "c:2: ranks: is set twice (first at c:1)"),
        ("pool: &p {size: 1GiB}\nleases:\n  <<: *p\n", "c:3: leases: merge keys (<<) are not supported"),
        ("ranks: !!python/object/apply:os.getpid []\n", "c:1: ranks: YAML tag"),
        ("ranks: &r [*r]\n", "c:1: ranks: is nested too deeply"),
        ("? [a, b]\n: 1\n", "c:1: a key must be a word"),
        ("ranks: 0\n", "c:1: ranks: should be greater than or equal to 1, got 0"),
        ("ranks: true\n", "c:1: ranks: should be a whole number, not true or false"),
        ("ranks: many\n", "c:1: ranks: should be a valid integer"),
        ("pool: 8GiB\n", "c:1: pool: needs a mapping of keys and values, got text"),
        ("pool: {hugepages: onn}\n", "c:1: pool.hugepages: 'onn' is not one of: auto, on, off (did you mean 'on'?)"),
        ("pool: {size: 101%}\n", "c:1: pool.size: '101%': a percentage is more than 0% and at most 100%"),
        ("pool: {size: 0}\n", "c:1: pool.size: '0': must be more than 0"),
        ("pool: {size: 1.5}\n", "c:1: pool.size: '1.5' is not a whole number of bytes"),
        ("hugepages: auto\n", "c:1: hugepages: unknown key here: it belongs at 'pool.hugepages'"),
        ("zzz: 1\n", "c:1: zzz: unknown key; valid here: chunk_tokens, controller, events, leases"),
        ("tiers: []\n", "c:1: tiers: needs at least one tier"),
        ("tiers: {backend: memory}\n", "c:1: tiers: needs a list, got a mapping"),
        ("tiers:\n  - ram\n", "c:2: tiers[0]: needs a mapping"),
        ("tiers:\n  - name: ram\n", "c:2: tiers[0].backend: is required"),
        ("tiers:\n  - backend: 7\n", "c:2: tiers[0].backend: should be a valid string, got 7"),
        ("tiers:\n  - backend: flder\n", "c:2: tiers[0].backend: no backend 'flder' (did you mean 'folder'?)"),
        ("tiers:\n  - backend: folder\n", "c:2: tiers[0].options.path: is required"),
        (
            "tiers:\n  - backend: folder\n    options: {pth: x, path: y}\n",
            "options.pth: unknown key (did you mean 'path'?)",
        ),
        ("tiers:\n  - backend: folder\n    options: frames\n", "c:3: tiers[0].options: needs a mapping"),
        ("tiers:\n  - {backend: peer, name: A B}\n", "c:2: tiers[0].name: 'A B' is not made of"),
        ("tiers:\n  - backend: peer\n  - backend: peer\n", "c:3: tiers[1].name: 'peer' is also the name of tiers[0]"),
        ("tiers:\n  - {backend: peer, evict: lur}\n", "c:2: tiers[0].evict: no policy 'lur' (did you mean 'lru'?)"),
        ("tiers:\n  - {backend: peer, codec: zlb}\n", "c:2: tiers[0].codec: no codec 'zlb' (did you mean 'zlib'?)"),
        ("tiers:\n  - {backend: peer, deadline: 250}\n", "c:2: tiers[0].deadline: '250' needs a unit: 250ms or 250s?"),
        ("tiers:\n  - {backend: peer, deadline: 2sec}\n", "(did you mean '2s'?)"),
        ("tiers:\n  - {backend: peer, write: demote}\n", "c:2: tiers[0].write: 'demote' waits for evictions"),
        ("tiers:\n  - {backend: peer, queue: {calls: 1, call: 2}}\n", "tiers[0].queue.call: unknown key"),
        ("metrics: {host: 0.0.0.0}\n", "c:1: metrics.host: '0.0.0.0' is not a loopback address"),
        ("service: {socket: " + "x" * 200 + "}\n", "c:1: service.socket: 200 bytes are too long"),
    ],
)
def test_mistakes(host: PluginHost, text: str, message: str) -> None:
    [fault] = faults(host, text, name="c")
    assert message in fault


def test_many_mistakes_at_once_and_no_false_ones(host: PluginHost) -> None:
    text = (
        "pool: {size: 5GBs}\n"
        "tiers:\n"
        "  - {backend: memory, capacity: 900GiB}\n"
        "  - {backend: folder, capacity: much, evict: none, options: {path: x}}\n"
        "  - {backend: fodler, capacity: 1GiB, write: thruogh}\n"
        "  - 17\n"
    )
    found = faults(host, text, name="c", machine=machine())
    assert [fault.split(": ")[1] for fault in found] == [
        "pool.size", "tiers[1].capacity", "tiers[2].backend", "tiers[2].write", "tiers[3]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda folder: folder / "missing.yaml", "No such file or directory (errno 2)"),
        (lambda folder: folder, "Is a directory (errno 21)"),
        (lambda folder: "a\0b", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(host: PluginHost, tmp_path: Path, make: Any, part: str) -> None:
    [fault] = faults(host, make(tmp_path))
    assert part in fault


def test_file_that_is_not_text(host: PluginHost, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"ranks: \xff\n")
    [fault] = faults(host, tmp_path / "c.yaml")
    assert "is not UTF-8 text: byte 7 is 0xff" in fault


def test_environment(host: PluginHost, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tiers:\n  - {backend: folder, name: my-disk, options: {path: x}}\n  - backend: peer\n")
    config = load_config(
        host=host,
        environ={
            "LMKV_CONFIG": str(file),
            "LMKV_POOL__HUGEPAGES": "off",
            "LMKV_POOL__PREFAULT": "false",
            "LMKV_TIERS__MY_DISK__CAPACITY": "7GiB",
            "LMKV_TIERS__0__OPTIONS__PATH": "elsewhere",
            "LMKV_TIERS__PEER__QUEUE__CALLS": "3",
            "LMKV_TIERS__PEER__OPTIONS__PORTS": "[7000]",
            "LMKV_METRICS__PORT": "null",
            "OTHER": "ignored",
        },
    )
    disk, peer = config.tiers
    assert (config.pool.hugepages, config.pool.prefault, config.metrics.port) == ("off", False, None)
    assert (disk.name, disk.capacity, disk.options.path) == ("my-disk", 7 * GIB, "elsewhere")
    assert (peer.queue.calls, peer.options.ports) == (3, [7000])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("LMKV_CONFG", "did you mean 'LMKV_CONFIG'?"),
        ("LMKV_TIERS__RAM__CAPCITY", "did you mean 'LMKV_TIERS__RAM__CAPACITY'?"),
        ("LMKV_TIERS__1__CAPACITY", "did you mean 'LMKV_TIERS__0__CAPACITY'?"),
        ("LMKV_POOL", "there is no such setting"),
        ("LMKV_", "there is no such setting"),
    ],
)
def test_unknown_names_in_the_environment(host: PluginHost, name: str, part: str) -> None:
    [fault] = faults(host, None, {name: "1"})
    assert fault.startswith(f"environment {name}: ")
    assert part in fault


def test_faulty_value_in_the_environment(host: PluginHost) -> None:
    [fault] = faults(host, None, {"LMKV_POOL__SIZE": "many"})
    assert fault.startswith("environment LMKV_POOL__SIZE: pool.size: 'many' is not a size")


@pytest.mark.parametrize("source", [{1: 2}, {"tiers": ({"backend": "folder", "options": {"pth": 1}},)}, {"pool": None}])
def test_mappings_are_checked_like_files(host: PluginHost, source: object) -> None:
    assert faults(host, source)


def test_override_where_there_is_no_place_for_it(host: PluginHost) -> None:
    [fault] = faults(host, "service: 5\n", name="c", overrides={"service.socket": "x"})
    assert fault == "c:1: service: needs a mapping of keys and values, got a number"


def test_options_that_nobody_checked_are_refused() -> None:
    with pytest.raises(ValueError, match="use load_config"):
        Config.model_validate({"tiers": [{"backend": "peer", "options": {"prots": [1]}}]})


def test_secrets_are_masked(host: PluginHost) -> None:
    text = "tiers:\n  - {backend: peer, options: {ports: [x], password: 4711geheim, paswort: 4711geheim}}\n"
    found = faults(host, text)
    assert len(found) == 2
    assert "4711geheim" not in "".join(found)
    config = load_config({"tiers": [{"backend": "peer", "options": {"password": "4711geheim"}}]}, host=host, environ={})
    shown = {setting.path: setting.value for setting in config.settings()}
    assert shown["tiers[0].options.password"] == "**********"
    assert "4711geheim" not in repr(config)
    assert "4711geheim" in config.text, "a child process needs it"


def test_text_makes_the_same_configuration_again(host: PluginHost) -> None:
    environ = {"LMKV_TIERS__PEER__DEADLINE": "300ms"}
    source = {"tiers": [{"backend": "peer"}], "pool": {"size": "25%", "hugepages": False}}
    config = load_config(source, host=host, environ=environ, overrides={"ranks": 4, "service.linger": "5s"})
    again = load_config(config.text, host=host, environ={})
    assert again.model_dump() == config.model_dump()
    assert (again.ranks, again.service.linger, again.tiers[0].deadline, again.pool.hugepages) == (4, 5.0, 0.3, "off")
    assert {s.path: s.source for s in config.settings()}["ranks"] == "set by the caller"
    assert load_config(host=host, environ={}).text == "{}"


def test_schema_knows_the_installed_plugins(host: PluginHost) -> None:
    schema = json_schema(host)
    tier = schema["$defs"]["TierConfig"]
    assert {"memory", "folder", "peer"} <= set(tier["properties"]["backend"]["enum"])
    assert {"lru", "leaf-first-lru", "none"} <= set(tier["properties"]["evict"]["enum"])
    [then] = [rule["then"] for rule in tier["allOf"] if rule["if"]["properties"]["backend"]["const"] == "folder"]
    options = schema["$defs"][then["properties"]["options"]["$ref"].rsplit("/", 1)[-1]]
    assert options["required"] == ["path"]
    assert options["additionalProperties"] is False
    assert then["required"] == ["options"]
    assert "default" not in schema["properties"]["tiers"]
    assert schema["$defs"]["PoolConfig"]["properties"]["size"]["default"] == "25%"
    assert tier["properties"]["deadline"]["default"] == "2s"
    references = set(re.findall(r'"#/\$defs/([^"]*)"', json.dumps(schema)))
    assert references <= set(schema["$defs"])


def test_memory_of_a_control_group_bounds_what_is_available(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (group.parent / "memory.max").write_text("4096000\n")
    (group.parent / "memory.current").write_text("3000000\n")
    (group.parent / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    assert available_memory(tmp_path) == 2096000


def test_reference_page_is_complete() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/configuration.md").read_text(encoding="utf-8")
    from lmkv.config.reference import rows

    for row in rows(Config):
        assert row in page.splitlines(), f"docs/reference/configuration.md lacks: {row}"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        (4096, 4096),
        ("300B", 300),
        ("1.5GB", 1_500_000_000),
        ("2kB", 2000),
        ("2KB", 2000),
        ("64 GiB", 64 * GIB),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["5GBs", "64G", "64gib", "-1", "", "GiB", "1e3", "1.5B", "25%", True, None, [], "0"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("2s", 2), ("1.5m", 90), ("1h", 3600), ("1d", 86400), ("20us", 2e-5), (0, 0)]
)
def test_times(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize("text", [5, "5", "5 sec", "5S", "-1s", "", True, None])
def test_what_is_no_time(text: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_seconds(text)
