"""Who computed the bytes: the model, down to its weights, and what one request adds to its tokens.

A frame may be used again only by an engine whose model gives the same KV. What is compared:

* the model's name, revision, dtype, quantisation and the resolved Hugging Face configuration (so overrides count);
* the weights: name, size and content name (a hub blob) or modification time (a plain folder) of every weight file. A
  folder copied without its times (`cp` instead of `cp -a`) therefore counts as another model: a miss, not a wrong hit;
* vLLM's version, since pages are its private format;
* for a request: adapter (name, path and the same fingerprint of its files), media ids with their spans, `cache_salt`.

Weights changed in memory cannot be seen: vLLM calls `reset_cache` for those.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmkv.keys import Extras, MediaSpan

if TYPE_CHECKING:
    from collections.abc import Iterable

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".npcache", ".tensors")
_NAMELESS_MEDIA: Final = re.compile(r"renderer\d+-mm-\d+-")
"""vLLM numbers media instead of hashing them when both of its caches are off: such ids mean nothing elsewhere."""
_NO_EXTRAS: Final = Extras()
_ROPE_BY_LENGTH: Final = ("longrope", "su", "dynamic")
"""Kinds of RoPE whose factors depend on the length that the engine was started for."""


def model_identity(vllm_config: Any) -> tuple[str, str, dict[str, str]]:
    """Model name, revision, and everything else about the weights that the KV depends on."""
    model = vllm_config.model_config
    name, revision = str(model.model), str(model.revision or "")
    extra = {
        "weights": files_fingerprint(model_folder(name, revision), WEIGHTS),
        "config": _config_digest(model.hf_config),
        "dtype": _plain(model.dtype),
    }
    optional = {
        "quantization": getattr(model, "quantization", None),
        "load_format": _unless(getattr(vllm_config.load_config, "load_format", None), ("auto", "hf", "safetensors")),
        "rope_length": model.max_model_len if _rope_depends_on_length(model.hf_config) else None,
    }
    if str(optional["load_format"]) == "dummy":
        optional["seed"] = model.seed
    if (speculative := getattr(vllm_config, "speculative_config", None)) is not None:
        draft = str(getattr(speculative, "model", None) or "")
        draft_revision = str(getattr(speculative, "revision", None) or "")
        weights = files_fingerprint(model_folder(draft, draft_revision), WEIGHTS)
        optional["speculative"] = f"{getattr(speculative, 'method', '')}:{draft}:{weights}"
    extra.update({key: _plain(value) for key, value in optional.items() if value not in (None, "")})
    return name, revision, extra


def model_folder(name: str, revision: str) -> Path | None:
    """The local folder of a model: itself a folder, or its snapshot in the hub's cache."""
    if not name:
        return None
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  only for hub ids; comes with vLLM
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision or None)
    except ValueError:  # not the name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def files_fingerprint(folder: Path | None, suffixes: Iterable[str]) -> str:
    """Digest over the files of `folder` with these suffixes; `unknown` when there is no folder.

    Of each: name, size, and the blob that a hub cache's link points to (named by its content), else the time of change.
    """
    if folder is None:
        return "unknown"
    lines = []
    wanted = tuple(suffixes)
    for path in sorted(folder.iterdir()):
        if path.suffix not in wanted:
            continue
        real = path.resolve()
        stat = real.stat()
        content = real.name if real.parent.name == "blobs" else str(stat.st_mtime_ns)
        lines.append(f"{path.name}\0{stat.st_size}\0{content}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _config_digest(hf_config: Any) -> str:
    """Digest of the configuration that the engine really uses, without the fields that only say where it came from."""
    values = dict(hf_config.to_dict())
    for field in ("_name_or_path", "transformers_version", "architectures_source", "_commit_hash"):
        values.pop(field, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _rope_depends_on_length(hf_config: Any) -> bool:
    text = json.dumps(hf_config.to_dict(), default=str)
    return any(f'"{kind}"' in text for kind in _ROPE_BY_LENGTH)


def _plain(value: object) -> str:
    """A value as text without the name of its type: `torch.bfloat16` is `bfloat16`, an enum its value."""
    return str(getattr(value, "value", value)).removeprefix("torch.")


def _unless(value: object, plain: tuple[str, ...]) -> str | None:
    text = _plain(value)
    return None if value is None or text in plain else text


class RequestExtras:
    """Turns vLLM's requests into `Extras`. Used on the scheduler's thread only."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[int, str, str], str] = {}

    def of(self, request: Any) -> Extras:
        """What the KV of `request` depends on besides its tokens."""
        lora, salt, features = request.lora_request, request.cache_salt, request.mm_features
        if lora is None and not salt and not features:
            return _NO_EXTRAS
        return Extras(
            salt=salt or "",
            adapter=lora.lora_name if lora is not None else "",
            adapter_version=self._adapter_version(lora) if lora is not None else "",
            media=tuple(
                MediaSpan(start=f.mm_position.offset, length=f.mm_position.length, identity=f.identifier)
                for f in features or ()
                if f.mm_position.length > 0
            ),
        )

    def _adapter_version(self, lora: Any) -> str:
        key = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        known = self._adapters.get(key)
        if known is None or getattr(lora, "load_inplace", False):
            folder = model_folder(lora.lora_path, "")
            known = f"{lora.lora_path}:{files_fingerprint(folder, (*WEIGHTS, '.json'))}"
            self._adapters[key] = known
        return known


def cacheable(request: Any) -> bool:
    """Whether tokens and extras say everything about this request's KV.

    Not so with prompt embeddings (no tokens), with a session whose earlier tokens may be taken back, and with media
    that vLLM only numbered.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None or getattr(request, "resumable", False):
        return False
    return not any(
        not feature.identifier or _NAMELESS_MEDIA.match(feature.identifier) for feature in request.mm_features or ()
    )
