from __future__ import annotations

import pytest

from lmkv.errors import ConfigError
from lmkv_vllm.link import stack_config
from lmkv_vllm.settings import Settings, read_settings


def test_defaults() -> None:
    assert read_settings(None) == read_settings({}) == Settings()


def test_flat_and_nested() -> None:
    """vLLM's dotted command line makes nested mappings."""
    flat = read_settings({"lmkv.config": "a.yaml", "lmkv.lookup_deadline": "20ms"})
    nested = read_settings({"lmkv": {"config": "a.yaml", "lookup_deadline": "20ms"}})
    assert flat == nested
    assert flat.lookup_deadline == 0.02


def test_inline() -> None:
    settings = read_settings({"lmkv.config": {"chunk_tokens": 128}})
    config = stack_config(settings, 4)
    assert config is not None
    assert (config.chunk_tokens, config.ranks) == (128, 4)


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    path = f"{tmp_path}/stack.yaml"
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  a plain path is what the variable has
        file.write("chunk_tokens: 96\n")
    monkeypatch.setenv("LMKV_CONFIG", path)
    config = stack_config(read_settings({}), 1)
    assert config is not None
    assert config.chunk_tokens == 96


def test_operators_service() -> None:
    assert stack_config(read_settings({"lmkv.socket": "/run/lmkv.sock"}), 1) is None


def test_a33_typos() -> None:
    """All faults at once, each with the nearest name."""
    with pytest.raises(ConfigError) as caught:
        read_settings(
            {
                "lmkv.confg": "x",
                "save_decode": True,
                "lmkv.load_threads": 0,
                "lmkv.lookup_deadline": "5 parsecs",
                "zzz": 1,
            }
        )
    faults = caught.value.faults
    assert len(faults) == 5
    assert "'lmkv.config'" in faults[0]
    assert "'lmkv.save_decode'" in faults[1]
    assert "lmkv.load_threads" in faults[2]
    assert "5 parsecs" in faults[3]
    assert "zzz" in faults[4]


def test_config_and_socket() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        read_settings({"lmkv.config": "a.yaml", "lmkv.socket": "/run/x"})


def test_typo_in_the_stack() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens"):
        stack_config(read_settings({"lmkv.config": {"chunk_tokenz": 128}}), 1)
