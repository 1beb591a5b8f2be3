"""`lmkv check` on tiers with codecs: the frame goes through them, and a wrong key is told before it does harm."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from engine_rig import Pages, namespace
from storage_rig import NoOptions, Shelf

from lmkv.cli import check
from lmkv.cli.probe import Result, probe
from lmkv.config import load_config
from lmkv.engine import CacheEngine
from lmkv.errors import ConfigError, PluginError
from lmkv.hookspecs import hookimpl
from lmkv.plugins import PluginHost
from lmkv.service import LocalClient, ThreadHost
from lmkv.specs import BackendSpec
from lmkv.storage.codecs import Codecs
from lmkv.storage.keymark import MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lmkv.memory import MemoryObject
    from lmkv.types import ChunkKey, Outcome

ONE, TWO = os.urandom(32).hex(), os.urandom(32).hex()


def stack(folder: Path, codec: str) -> str:
    (folder / "stack.yaml").write_text(
        "pool: {size: 8MiB, prefault: false}\nchunk_tokens: 8\n"
        f"tiers:\n  - {{backend: cpu, capacity: 50%}}\n  - {{backend: disk, capacity: 64MiB, codec: {codec},\n"
        f"     options: {{path: {folder}/frames}}}}\n"
    )
    return str(folder / "stack.yaml")


def aes(name: str, **keys: str) -> str:
    listed = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return f"[zstd, {{aes-gcm: {{keys: {{{listed}}}, use: {name}}}}}]"


def run(file: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert check.run(file, show=False, offline=False) == code
    output = capsys.readouterr()
    assert ONE not in output.out + output.err
    assert TWO not in output.out + output.err
    return output.out


@pytest.mark.parametrize("codec", ["zlib", "zstd", "bf16-planes", "fp8", "[bf16-planes, zstd]", aes("k", k=ONE)])
def test_the_frame_of_a_check_goes_through_the_codec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codec: str
) -> None:
    output = run(stack(tmp_path, codec), capsys)
    *_, row = [line for line in output.splitlines() if line.startswith("  disk")]
    assert all(f" {step} " in row for step in ("encode", "put", "get", "decode", "delete")), row


def store(file: str) -> None:
    """Frames as an engine stores them."""
    host = ThreadHost(load_config(file, host=PluginHost.discover(), environ={}))
    try:
        pages = Pages()
        with CacheEngine(LocalClient(host, "test"), namespace(), gpu=pages.gpu) as engine:
            tokens, ids = np.arange(16), np.arange(8)
            pages.compute(tokens, ids)
            assert engine.store(tokens, ids).all()
    finally:
        host.close()


def test_check_tells_a_wrong_key_by_the_frames_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stack(tmp_path, aes("k", k=ONE))
    run(file, capsys)
    store(file)
    assert "FAILED" not in run(file, capsys)
    output = run(stack(tmp_path, aes("k", k=TWO)), capsys, code=1)
    assert "key: encrypted with another key than the one given here as 'k': give the right one" in output
    assert "written with a key that is not given here" in run(stack(tmp_path, aes("n", n=TWO)), capsys)
    assert "not given here" not in run(stack(tmp_path, aes("n", n=TWO, k=ONE)), capsys)


def test_an_engine_compresses_with_chains(tmp_path: Path) -> None:
    host = ThreadHost(load_config(stack(tmp_path, aes("k", k=ONE)), host=PluginHost.discover(), environ={}))
    try:
        pages = Pages()
        with CacheEngine(LocalClient(host, "test"), namespace(), gpu=pages.gpu) as engine:
            tokens, ids = np.arange(16), np.arange(8)
            pages.compute(tokens, ids)
            before = [buffer[ids].copy() for buffer in pages.buffers]
            assert engine.store(tokens, ids).all()
            for codec in ("zlib+aes-gcm", "bf16-planes+zstd+aes-gcm", "aes-gcm"):
                assert until(lambda codec=codec: engine.compress(tokens, "disk", codec) == 2), codec
                assert engine.clear("cpu") == {"cpu": 2}
                for buffer in pages.buffers:
                    buffer[ids] = 0
                assert engine.retrieve(tokens, ids).all()
                assert all(
                    np.array_equal(buffer[ids], kept) for buffer, kept in zip(pages.buffers, before, strict=True)
                )
            with pytest.raises(ConfigError, match=r"tier 'disk' encrypts \(zstd\+aes-gcm\): it stores nothing with"):
                engine.decompress(tokens, "disk")
            with pytest.raises(PluginError, match="no codec 'zlb'"):
                engine.compress(tokens, "disk", "zlb+aes-gcm")
    finally:
        host.close()


def until(done: Callable[[], bool]) -> bool:
    """Stores go on their way after the call."""
    return any(done() or time.sleep(0.05) for _ in range(100))  # type: ignore[func-returns-value]


def test_check_tells_a_missing_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "lmkv.codec.zstd", raising=False)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    output = run(stack(tmp_path, "zstd"), capsys, code=1)
    assert "tier 'disk': this codec needs zstandard: pip install 'lmkv[codecs]'" in output


def look(shelf: Shelf, codec: str) -> Result:
    spec = BackendSpec(name="far", summary="", options=lambda: NoOptions, load=lambda: lambda options, context: shelf)
    host = PluginHost.discover(extra=[SimpleNamespace(__name__="far", lmkv_backends=hookimpl(lambda: [spec]))])
    config = load_config(f"tiers:\n  - {{backend: far, codec: {codec}}}\n", host=host, environ={})
    [tier] = config.tiers
    return probe(tier, None, 1, host, Codecs([tier.codec], host))


def test_check_tells_a_wrong_key_of_a_shared_store_by_its_mark() -> None:
    shelf = Shelf(shared=True)
    assert look(shelf, aes("k", k=ONE)).ok
    assert list(shelf.frames) == [MARK], "the frame of the check has gone, the mark stays"
    assert look(shelf, aes("k", k=ONE)).ok
    wrong = look(shelf, aes("k", k=TWO))
    assert wrong.problem == "key: encrypted with another key than the one given here as 'k': give the right one"
    assert look(shelf, "zstd").ok
    assert list(shelf.frames) == [MARK]


def test_a_store_that_changes_frames_is_told() -> None:
    class Bent(Shelf):
        def get(self, keys: Sequence[ChunkKey], into: Sequence[MemoryObject]) -> Sequence[Outcome]:
            outcomes = super().get(keys, into)
            into[0].view[:8] = bytes(8)
            return outcomes

    assert "compare: frame: checksum" in look(Bent(shared=True), aes("k", k=ONE)).problem
