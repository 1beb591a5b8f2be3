"""The `codec` key of a tier: names, lists, options; what is wrong with them and where."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from lmkv.codec.identity import IdentityCodec
from lmkv.config import json_schema, load_config
from lmkv.errors import ConfigError, PluginError
from lmkv.hookspecs import hookimpl
from lmkv.plugins import PluginHost
from lmkv.specs import CodecSpec
from lmkv.storage.codecs import Codecs

if TYPE_CHECKING:
    from pathlib import Path

    from lmkv.config import Config

KEY = os.urandom(32).hex()


class _Raising(BaseModel):
    def model_post_init(self, context: Any) -> None:
        raise RuntimeError("what now")


def _broken() -> Any:
    raise ImportError("no such thing")


STRANGERS = SimpleNamespace(
    __name__="strangers",
    lmkv_codecs=hookimpl(
        lambda: [
            CodecSpec(name="lossy-too", summary="", load=lambda: IdentityCodec, lossless=False),
            CodecSpec(name="raising", summary="", load=lambda: IdentityCodec, options=lambda: _Raising),
            CodecSpec(name="broken", summary="", load=lambda: IdentityCodec, options=_broken),
            CodecSpec(name="x" * 120, summary="", load=lambda: IdentityCodec),
            CodecSpec(name="y" * 140, summary="", load=lambda: IdentityCodec),
        ]
    ),
)


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.discover(extra=[STRANGERS])


def config(host: PluginHost, codec: str, **environ: str) -> Config:
    return load_config(
        f"tiers:\n  - backend: cpu\n    capacity: 50%\n  - backend: disk\n    capacity: 1MiB\n    codec: {codec}\n"
        "    options: {path: /x}\n",
        host=host,
        name="c",
        environ=environ,
    )


def fault(host: PluginHost, codec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(host, codec)
    [found] = caught.value.faults
    return found


@pytest.mark.parametrize(
    ("codec", "name", "options"),
    [
        ("identity", "identity", [None]),
        ("zlib", "zlib", [None]),
        ("zstd", "zstd", [{"level": 1}]),
        ("{zstd: {level: 3}}", "zstd", [{"level": 3}]),
        ("[{zstd: {level: -3}}]", "zstd", [{"level": -3}]),
        ("[zstd]", "zstd", [{"level": 1}]),
        ("[{zstd: }]", "zstd", [{"level": 1}]),
        ("[{bf16-planes: {}}, zstd]", "bf16-planes+zstd", [None, {"level": 1}]),
        (f"[bf16-planes, {{aes-gcm: {{keys: {{a: {KEY}}}}}}}]", "bf16-planes+aes-gcm", [None, ...]),
        (f"[fp8, zstd, {{aes-gcm: {{keys: {{a: {KEY}, b: {KEY}}}, use: b}}}}]", "fp8+zstd+aes-gcm", [None, ..., ...]),
    ],
)
def test_names_lists_and_options(host: PluginHost, codec: str, name: str, options: list[Any]) -> None:
    chain = config(host, codec).tiers[1].codec
    assert chain.name == name
    for step, wanted in zip(chain.steps, options, strict=True):
        if wanted is not ...:
            assert (None if step.options is None else step.options.model_dump()) == wanted


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("zlb", "c:6: tiers[1].codec: no codec 'zlb' (did you mean 'zlib'?)"),
        ("[bf16-plane, zstd]", "c:6: tiers[1].codec[0]: no codec 'bf16-plane' (did you mean 'bf16-planes'?)"),
        ("[zlib, {zstdd: {level: 1}}]", "c:6: tiers[1].codec[1].zstdd: no codec 'zstdd' (did you mean 'zstd'?)"),
        ("{zstd: {levl: 1}}", "c:6: tiers[1].codec.zstd.levl: unknown key (did you mean 'level'?)"),
        ("[{zstd: {level: 40}}]", "c:6: tiers[1].codec[0].zstd.level: should be less than or equal to 19"),
        ("[{zstd: {level: '3'}}]", "c:6: tiers[1].codec[0].zstd.level: should be a valid integer"),
        ("[{zstd: fast}]", "c:6: tiers[1].codec[0].zstd: needs a mapping of keys and values, got text"),
        ("{zlib: {level: 2}}", "c:6: tiers[1].codec.zlib: codec 'zlib' has no options"),
        ("{zstd: {}, zlib: {}}", "c:6: tiers[1].codec: needs a list where there are several codecs"),
        ("[]", "c:6: tiers[1].codec: is an empty list: leave it out, or write identity"),
        ("7", "c:6: tiers[1].codec: needs the name of a codec, {name: options}, or a list of these"),
        ("[[zstd]]", "c:6: tiers[1].codec[0]: needs the name of a codec"),
        ("", "c:6: tiers[1].codec: needs the name of a codec"),
        ("[zstd, zstd]", "c:6: tiers[1].codec[1]: codec 'zstd' stands in the list twice"),
        ("[identity, zstd]", "c:6: tiers[1].codec[0]: identity does nothing: leave it out of the list"),
        (
            "[zstd, bf16-planes]",
            "c:6: tiers[1].codec[1]: codec 'bf16-planes' works on the KV values as they are: it has to",
        ),
        ("[fp8, bf16-planes]", "codec 'bf16-planes' works on the KV values as they are: it has to stand first"),
        ("[fp8, lossy-too]", "c:6: tiers[1].codec[1]: codec 'lossy-too' is lossy, and so is 'fp8': choose one of them"),
        (f"[{{aes-gcm: {{keys: {{a: {KEY}}}}}}}, zstd]", "which looks random: put 'aes-gcm' last"),
        ("raising", "c:6: tiers[1].codec.raising: RuntimeError in the codec's check: what now"),
        ("broken", "c:6: tiers[1].codec: codec 'broken' of strangers cannot be loaded: ImportError: no such thing"),
        (f"[{'x' * 120}, {'y' * 140}]", "c:6: tiers[1].codec: the names are longer than 255 characters together"),
    ],
)
def test_what_is_wrong_and_where(host: PluginHost, codec: str, message: str) -> None:
    assert message in fault(host, codec)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{}", "aes-gcm.keys: Dictionary should have at least 1 item"),
        (
            "{a: geheim4711}",
            "aes-gcm.keys.a: a key of 7 bytes: AES takes 16, 24 or 32 (`openssl rand -base64 32` makes",
        ),
        ("{a: 'geheim 4711'}", "aes-gcm.keys.a: a key is written in base64 or hexadecimal digits: `openssl rand"),
        (f"{{a: {'aa' * 32}}}", "aes-gcm.keys.a: a key of one repeated byte is none"),
        ("{a: {env: LMKV_NO_SUCH}}", "aes-gcm.keys.a: environment variable LMKV_NO_SUCH is not set, or empty"),
        (
            "{a: {file: /no/such/geheim4711}}",
            "aes-gcm.keys.a: cannot read /no/such/geheim4711: No such file or directory",
        ),
        (f"{{'a b': {KEY}}}", "aes-gcm.keys: are written {name: key}; a name is 1 to 32 letters"),
        (f"{{a: {KEY}, b: {KEY}}}", "aes-gcm: use: which of the keys a, b is to be written with?"),
        (f"{{a: {KEY}}}, use: b", "aes-gcm: use: there is no key 'b'; keys: a"),
        (f"{{a: {KEY}}}, use: {'0123456789abcdef' * 2}", "aes-gcm: use: there is no key of that name; keys: a"),
        (f"{{'{KEY}': a}}", "aes-gcm.keys: are written {name: key}; a name is 1 to 32"),
        (f"{{{'0123456789abcdef' * 2}: a}}", "aes-gcm.keys: are written {name: key}; a name is 1 to 32"),
        ("{geheim 4711: a}", "aes-gcm.keys: are written {name: key}; a name is 1 to 32"),
        (f"{{a: {KEY}}}, usee: b", "aes-gcm.usee: unknown key (did you mean 'use'?)"),
    ],
)
def test_what_is_wrong_with_keys_without_telling_them(host: PluginHost, keys: str, message: str) -> None:
    found = fault(host, f"[zstd, {{aes-gcm: {{keys: {keys}}}}}]")
    assert message in found
    assert KEY not in found
    if "/no/such" not in keys:
        assert "4711" not in found


def test_aes_gcm_without_keys(host: PluginHost) -> None:
    assert fault(host, "aes-gcm") == "c:6: tiers[1].codec.aes-gcm.keys: is required"
    with pytest.raises(ConfigError, match="codec 'aes-gcm' needs options: keys"):
        host.load_codec("aes-gcm")


@pytest.mark.parametrize("text", [KEY, KEY.upper(), "{b64}", "{url}", "{bare}", " {b64} "])
def test_how_keys_may_be_written(text: str) -> None:
    import base64

    from lmkv.codec.options import key_bytes

    key = bytes.fromhex(KEY)
    b64, url = base64.b64encode(key).decode(), base64.urlsafe_b64encode(key).decode()
    assert key_bytes(text.format(b64=b64, url=url, bare=b64.rstrip("="))) == key


@pytest.mark.parametrize("size", [16, 24, 32])
def test_sizes_of_keys(size: int) -> None:
    from lmkv.codec.options import key_bytes

    key = os.urandom(size)
    assert key_bytes(key.hex()) == key


def test_a31_secrets_of_codecs_from_files_and_masked(host: PluginHost, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    made = config(host, f"[zstd, {{aes-gcm: {{keys: {{a: {{file: {tmp_path}/key}}, b: {KEY}}}, use: a}}}}]")
    shown = {setting.path: (setting.value, setting.source) for setting in made.settings()}
    assert shown["tiers[1].codec"] == ("[zstd, aes-gcm]", "c:6")
    assert shown["tiers[1].codec[0].zstd.level"] == ("1", "default")
    assert shown["tiers[1].codec[1].aes-gcm.keys.b"] == ("**********", "c:6")
    assert shown["tiers[1].codec[1].aes-gcm.use"] == ("a", "c:6")
    assert KEY not in f"{made!r} {made.tiers[1].codec} {shown}"
    again = load_config(made.text, host=host, environ={})
    assert again.tiers[1].codec == made.tiers[1].codec, "a child process reads the same"
    made.model_dump_json()


def test_effective_values(host: PluginHost) -> None:
    shown = {s.path: (s.value, s.source) for s in config(host, "{zstd: {level: 5}}").settings()}
    assert shown["tiers[0].codec"] == ("identity", "default")
    assert shown["tiers[1].codec"] == ("zstd", "c:6")
    assert shown["tiers[1].codec.zstd.level"] == ("5", "c:6")


def test_codec_from_the_environment(host: PluginHost) -> None:
    made = config(host, "zlib", LMKV_TIERS__DISK__CODEC="[bf16-planes, {zstd: {level: 2}}]")
    assert made.tiers[1].codec.name == "bf16-planes+zstd"
    assert config(host, "zlib", LMKV_TIERS__1__CODEC="zstd").tiers[1].codec.name == "zstd"
    with pytest.raises(
        ConfigError, match=r"environment LMKV_TIERS__DISK__CODEC: tiers\[1\].codec\[0\]: no codec 'zst'"
    ):
        config(host, "zlib", LMKV_TIERS__DISK__CODEC="[zst]")


def test_resident_tiers_take_no_codec(host: PluginHost) -> None:
    from lmkv.config import Machine

    with pytest.raises(ConfigError, match=r"tiers\[0\].codec: has no effect: this tier keeps frames in memory"):
        load_config(
            {"tiers": [{"backend": "cpu", "capacity": "50%", "codec": "zstd"}]},
            host=host,
            environ={},
            machine=Machine.local(),
        )
    plain = {"tiers": [{"backend": "cpu", "capacity": "50%", "codec": "identity"}]}
    assert load_config(plain, host=host, environ={}, machine=Machine.local()).tiers[0].codec.name == "identity"


def test_options_that_nobody_checked_are_refused() -> None:
    from lmkv.config import Config

    made = Config.model_validate({"tiers": [{"backend": "peer", "codec": "zlib"}]})
    assert made.tiers[0].codec.name == "zlib"
    with pytest.raises(ValueError, match="use load_config"):
        Config.model_validate({"tiers": [{"backend": "peer", "codec": ["zlib"]}]})


def test_schema_knows_codecs_and_their_options(host: PluginHost) -> None:
    schema = json_schema(host)
    codec = schema["$defs"]["TierConfig"]["properties"]["codec"]
    names, *mappings, listed = codec["anyOf"]
    assert {"identity", "zstd", "aes-gcm", "bf16-planes"} <= set(names["enum"])
    assert codec["default"] == "identity"
    by_name = {next(iter(m["properties"])): m for m in mappings}
    level = schema["$defs"][by_name["zstd"]["properties"]["zstd"]["anyOf"][0]["$ref"].rsplit("/", 1)[-1]]
    assert level["properties"]["level"]["maximum"] == 19
    keys = schema["$defs"][by_name["aes-gcm"]["properties"]["aes-gcm"]["$ref"].rsplit("/", 1)[-1]]
    assert keys["required"] == ["keys"]
    assert listed["items"]["anyOf"] == [names, *mappings]
    json.dumps(schema)


def test_each_tier_has_its_own_codec_and_reads_what_others_can(host: PluginHost) -> None:
    chains = [config(host, codec).tiers[1].codec for codec in (
        "{zstd: {level: 1}}", "{zstd: {level: 9}}", f"[zlib, {{aes-gcm: {{keys: {{a: {KEY}}}}}}}]",
    )]  # fmt: skip
    codecs = Codecs(chains, host)
    one, two, three = (codecs.of(chain, f"t{i}") for i, chain in enumerate(chains))
    assert one("zstd") is not two("zstd")
    assert three("zlib+aes-gcm") is three("zlib+aes-gcm")
    assert one("aes-gcm").name == "aes-gcm", "the keys of another tier"
    assert one("bf16-planes+aes-gcm").seals
    with pytest.raises(ConfigError, match="needs options"):
        Codecs(chains[:1], host).of(chains[0], "t")("zlib+aes-gcm")
    with pytest.raises(PluginError, match="no codec 'gone'"):
        one("zlib+gone")


def test_a_codec_that_cannot_be_loaded_names_the_tier(host: PluginHost, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "lmkv.codec.zstd", raising=False)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    chain = config(host, "zstd").tiers[1].codec
    with pytest.raises(PluginError, match=r"^tier 'disk': this codec needs zstandard: pip install 'lmkv\[codecs\]'$"):
        Codecs([chain], host).of(chain, "disk")
