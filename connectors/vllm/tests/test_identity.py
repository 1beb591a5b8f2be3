"""What makes two requests, or two models, the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.keys import KeyChain
from lmkv_vllm.identity import RequestExtras, cacheable, model_identity
from lmkv_vllm.weights import HEAD, SLICE, SLICES, files_fingerprint, model_folder, unknown


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


def test_adapter_that_is_no_folder() -> None:
    """Named by a repository: the workers fetch it later, so no other process may take its KV for its own adapter's."""
    adapter = request(lora_request=lora("x", Path("org/adapter-nobody-has")))
    here = RequestExtras()
    assert here.of(adapter) == here.of(adapter)
    assert here.of(adapter) != RequestExtras().of(adapter)
    inplace = request(lora_request=lora("x", Path("org/adapter-nobody-has"), inplace=True))
    assert here.of(inplace) != here.of(inplace)


def test_weights(tmp_path: Path) -> None:
    """Another size, another time, another name: another model. A copy with its times: the same."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("hello")
    first = files_fingerprint(folder)
    (folder / "README.md").write_text("changed")
    assert files_fingerprint(folder) == first
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy2)
    assert files_fingerprint(tmp_path / "copy") == first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert files_fingerprint(folder) != first
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert files_fingerprint(folder) not in {first, None}
    assert files_fingerprint(None) is None
    assert files_fingerprint(folder, [".gguf"]) is None
    (folder / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert files_fingerprint(folder) is None


@pytest.mark.parametrize("place", ["start", "inside", "slice", "end"])
def test_weights_of_the_same_size_and_time(tmp_path: Path, place: str) -> None:
    """An image that was built reproducibly: a fine-tune has the same names, sizes and times, and other content."""
    size = HEAD + 3 * SLICE * SLICES + 17
    at = {"start": 0, "inside": HEAD // 2, "slice": HEAD + 3 * SLICE * 7 + 5, "end": size - 1}[place]
    file = tmp_path / "model.safetensors"
    content = bytearray(size)
    found = []
    for value in (0, 1, 0):
        content[at] = value
        file.write_bytes(content)
        os.utime(file, ns=(0, 0))
        found.append(files_fingerprint(tmp_path))
    assert found[0] == found[2] != found[1]


def test_hub_snapshot(tmp_path: Path) -> None:
    """Links of a hub's cache point to blobs named by their content: the time does not matter."""
    blobs, one, two = tmp_path / "blobs", tmp_path / "one", tmp_path / "two"
    for folder in (blobs, one, two):
        folder.mkdir()
    (blobs / ("c0ffee" + "0" * 34)).write_bytes(b"weights")
    for folder in (one, two):
        (folder / "model.safetensors").symlink_to(blobs / ("c0ffee" + "0" * 34))
    first = files_fingerprint(one)
    os.utime(blobs / ("c0ffee" + "0" * 34), ns=(1, 1))
    assert files_fingerprint(two) == first
    (blobs / "model.safetensors").write_bytes(b"weights")  # no cache, merely a folder of that name
    before = files_fingerprint(blobs)
    os.utime(blobs / "model.safetensors", ns=(1, 1))
    assert files_fingerprint(blobs) != before


def test_where_a_model_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "cache" / "models--org--name"
    (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    place = str(tmp_path / "cache")
    assert model_folder("org/name", "", place) == cache / "snapshots" / commit
    assert model_folder("org/name", commit, place) == cache / "snapshots" / commit
    assert model_folder("org/name", "other", place) is None
    assert model_folder("s3://bucket/name", "", place) is None
    assert model_folder("", "", place) is None
    assert model_folder(str(tmp_path)) == tmp_path
    (tmp_path / "model.gguf").write_bytes(b"weights")
    assert model_folder(str(tmp_path / "model.gguf")) == tmp_path
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert model_folder("org/name", "", place) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def vllm_config(folder: Path | str, **more: Any) -> Any:
    hf = {"rope_theta": 1.0, "_name_or_path": str(folder), **more.pop("hf", {})}
    load = SimpleNamespace(load_format=more.pop("load_format", "auto"), download_dir=None)
    whole = {"speculative_config": None, "lora_config": None, **more.pop("whole", {})}
    media = more.pop("media", None)
    model = {
        "model": str(folder),
        "revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "max_model_len": 4096,
        "seed": 0,
        "hf_config": SimpleNamespace(to_dict=lambda: hf),
        "multimodal_config": media_config(media) if media is not None else None,
        **more,
    }
    return SimpleNamespace(model_config=SimpleNamespace(**model), load_config=load, **whole)


def media_config(media: dict[str, Any]) -> Any:
    return pytest.importorskip("vllm.config").MultiModalConfig(**media)


def draft(folder: Path, **more: Any) -> dict[str, Any]:
    config = SimpleNamespace(model=str(folder), revision=None)
    values = {"method": "eagle", "model": str(folder), "draft_model_config": config, "draft_load_config": None, **more}
    return {"speculative_config": SimpleNamespace(**values)}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"quantization_config": {"ignore": ["lm_head"]}},
        {"model_impl": "transformers"},
        {"disable_sliding_window": True},
        {"revision": "v2"},
        {"hf": {"rope_theta": 2.0}},
        {"load_format": "dummy"},
        {"load_format": "sharded_state"},
        {"hf": {"rope_scaling": {"type": "longrope"}}, "max_model_len": 8192},
        {"whole": {"lora_config": SimpleNamespace(lora_dtype="torch.float16")}},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs=None)},
    ],
)
def test_model(folder: Path, change: dict[str, Any]) -> None:
    assert model_identity(vllm_config(folder)) == model_identity(vllm_config(folder))
    assert model_identity(vllm_config(folder, **change)) != model_identity(vllm_config(folder))


def test_weights_are_of_the_identity(folder: Path) -> None:
    first = model_identity(vllm_config(folder))
    (folder / "model.safetensors").write_bytes(b"changed")
    assert model_identity(vllm_config(folder)) != first


def test_seed_of_random_weights(folder: Path) -> None:
    made = [model_identity(vllm_config(folder, load_format="dummy", seed=seed)) for seed in (1, 2, 1)]
    assert made[0] == made[2] != made[1]
    assert model_identity(vllm_config(folder, seed=1)) == model_identity(vllm_config(folder, seed=2))


def test_draft_model(tmp_path: Path, folder: Path) -> None:
    """None, one, another way, and one with other weights under the same path."""
    small = tmp_path / "draft"
    small.mkdir()
    (small / "model.safetensors").write_bytes(b"draft")
    found = [model_identity(vllm_config(folder, whole=more)) for more in (
        {}, draft(small), draft(small, method="draft_model"), draft(small, method="ngram", draft_model_config=None),
    )]  # fmt: skip
    assert model_identity(vllm_config(folder, whole=draft(small))) == found[1]
    (small / "model.safetensors").write_bytes(b"tuned")
    found.append(model_identity(vllm_config(folder, whole=draft(small))))
    assert len({str(identity) for identity in found}) == len(found)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "s3://bucket/model"},
        {"model": "org/name-nobody-has"},
        {"model_weights": "s3://bucket/model"},
        {"load_format": "tensorizer"},
        {"model": "EMPTY"},
    ],
)
def test_weights_that_cannot_be_told(tmp_path: Path, folder: Path, change: dict[str, Any]) -> None:
    """Other weights may lie under the same address at the next start: never equal to what another process has."""
    change = {key: str(tmp_path) if value == "EMPTY" else value for key, value in change.items()}
    assert model_identity(vllm_config(folder, **change)) != model_identity(vllm_config(folder, **change))
    assert unknown() != unknown()


@pytest.mark.parametrize(
    "change",
    [
        {"mm_processor_kwargs": {"do_center_crop": False}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"video_pruning_rate": 0.5},
        {"video_pruning_method": "vidcom2"},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_encoder_tp_mode": "data"},
        {"mm_device_do_normalize": False},
    ],
)
def test_settings_for_media(folder: Path, change: dict[str, Any]) -> None:
    """vLLM's ids name what was sent; what the engine's settings make of it is not in them."""
    plain = {"mm_processor_kwargs": {"do_center_crop": True}}
    first = model_identity(vllm_config(folder, media=plain))
    assert model_identity(vllm_config(folder, media=plain)) == first
    assert model_identity(vllm_config(folder, media={**plain, **change})) != first


def test_settings_for_media_that_change_nothing(folder: Path) -> None:
    first = model_identity(vllm_config(folder, media={}))
    for more in ({"mm_processor_cache_gb": 0}, {"skip_mm_profiling": True}, {"limit_per_prompt": {"image": 2}}):
        assert model_identity(vllm_config(folder, media=more)) == first, more


def test_scales_of_media_are_read(tmp_path: Path, folder: Path) -> None:
    scales = tmp_path / "scales.json"
    media = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales)}
    found = []
    for text in ("1", "2", "1"):
        scales.write_text(text)
        found.append(model_identity(vllm_config(folder, media=media)))
    assert found[0] == found[2] != found[1]


def test_length_matters_only_to_some(folder: Path) -> None:
    short, long = (model_identity(vllm_config(folder, max_model_len=length)) for length in (1024, 8192))
    assert short == long
