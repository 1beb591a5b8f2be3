"""What makes two requests, or two models, the same."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lmkv.keys import KeyChain
from lmkv_vllm.identity import RequestExtras, cacheable, files_fingerprint, model_identity

if TYPE_CHECKING:
    from pathlib import Path


def request(**more: Any) -> Any:
    values: dict[str, Any] = {
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_token_ids": [1],
        "prompt_embeds": None,
        "resumable": False,
    }
    return SimpleNamespace(**{**values, **more})


def media(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def digests(of: Any, tokens: list[int]) -> list[bytes]:
    chain = KeyChain(4, 2, RequestExtras().of(of))
    chain.extend(tokens)
    return chain.digests


def lora(name: str, path: Path, number: int = 1, *, inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=inplace)


def test_a03_two_images_one_question() -> None:
    """Image ids that are equal in their last 16 bits: text before the image is shared, the image and after are not."""
    tokens = [1, 2, 3, 4, 9, 9, 9, 5, 6, 7, 8, 1]
    one = digests(request(mm_features=[media("aaaa0000ffff", 4, 3)]), tokens)
    two = digests(request(mm_features=[media("bbbb0000ffff", 4, 3)]), tokens)
    none = digests(request(), tokens)
    assert one[0] == two[0] == none[0]
    assert len({one[1], two[1], none[1]}) == 3
    assert len({one[2], two[2], none[2]}) == 3


def test_a02_fields_do_not_mix(tmp_path: Path) -> None:
    first, second = tmp_path / "x", tmp_path / "y"
    for folder in (first, second):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(folder.name.encode())
    tokens = [1, 2, 3, 4]
    found = [
        digests(request(), tokens)[0],
        digests(request(cache_salt="x"), tokens)[0],
        digests(request(lora_request=lora("x", first)), tokens)[0],
        digests(request(lora_request=lora("x", second)), tokens)[0],
        digests(request(lora_request=lora("y", first)), tokens)[0],
        digests(request(mm_features=[media("x", 0, 2)]), tokens)[0],
    ]
    assert len(set(found)) == len(found)


def test_adapter_loaded_anew_in_place(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    extras = RequestExtras()
    before = extras.of(request(lora_request=lora("x", tmp_path)))
    weights.write_bytes(b"two!")
    assert extras.of(request(lora_request=lora("x", tmp_path))) == before
    assert extras.of(request(lora_request=lora("x", tmp_path, inplace=True))) != before


def test_cacheable() -> None:
    assert cacheable(request())
    assert cacheable(request(mm_features=[media("d1ce", 0, 2)]))
    assert not cacheable(request(prompt_token_ids=None))
    assert not cacheable(request(prompt_embeds=object()))
    assert not cacheable(request(resumable=True))
    # vLLM's number for an image when it hashes none: the same for another image after a restart.
    assert not cacheable(request(mm_features=[media("renderer0-mm-1-image-0", 0, 2)]))


def test_weights(tmp_path: Path) -> None:
    """Another size, another time, another name: another model. A copy with its times: the same."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("hello")
    first = files_fingerprint(folder, [".safetensors"])
    (folder / "README.md").write_text("changed")
    assert files_fingerprint(folder, [".safetensors"]) == first
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy2)
    assert files_fingerprint(tmp_path / "copy", [".safetensors"]) == first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert files_fingerprint(folder, [".safetensors"]) != first
    assert files_fingerprint(None, [".safetensors"]) == "unknown"


def test_hub_snapshot(tmp_path: Path) -> None:
    """Links of a hub's cache point to blobs named by their content: the time does not matter."""
    blobs, one, two = tmp_path / "blobs", tmp_path / "one", tmp_path / "two"
    for folder in (blobs, one, two):
        folder.mkdir()
    (blobs / "c0ffee").write_bytes(b"weights")
    for folder in (one, two):
        (folder / "model.safetensors").symlink_to(blobs / "c0ffee")
    first = files_fingerprint(one, [".safetensors"])
    os.utime(blobs / "c0ffee", ns=(1, 1))
    assert files_fingerprint(two, [".safetensors"]) == first


def vllm_config(folder: Path, **more: Any) -> Any:
    hf = {"rope_theta": 1.0, "_name_or_path": str(folder), **more.pop("hf", {})}
    model = {
        "model": str(folder),
        "revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "max_model_len": 4096,
        "seed": 0,
        "hf_config": SimpleNamespace(to_dict=lambda: hf),
        **more,
    }
    load = SimpleNamespace(load_format=more.pop("load_format", "auto"))
    return SimpleNamespace(model_config=SimpleNamespace(**model), load_config=load, speculative_config=None)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"hf": {"rope_theta": 2.0}},
        {"load_format": "dummy"},
        {"hf": {"rope_scaling": {"type": "longrope"}}, "max_model_len": 8192},
    ],
)
def test_model(tmp_path: Path, change: dict[str, Any]) -> None:
    assert model_identity(vllm_config(tmp_path, **change))[2] != model_identity(vllm_config(tmp_path))[2]


def test_length_matters_only_to_some(tmp_path: Path) -> None:
    short, long = (model_identity(vllm_config(tmp_path, max_model_len=length)) for length in (1024, 8192))
    assert short == long
