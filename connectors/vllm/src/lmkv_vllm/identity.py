"""Who computed the bytes: the model, down to its weights, and what one request adds to its tokens.

A frame may be used again only by an engine whose model gives the same KV. What is compared:

* the model's name, revision, dtype, quantisation and the resolved Hugging Face configuration (so overrides count);
* the weights, see `lmkv_vllm.weights`; those that cannot be told from others are equal to no other process's;
* all of vLLM's settings for media but those that say where and when something is computed: the ids that vLLM gives to
  media name what was sent, not what the settings of the engine make of it;
* vLLM's version, since pages are its private format;
* for a request: adapter (name, path and a fingerprint of its files), media ids with their spans, `cache_salt`.

Weights changed in memory cannot be seen: vLLM calls `reset_cache` for those.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmkv.keys import Extras, MediaSpan
from lmkv_vllm.guard import INCIDENTS, logger
from lmkv_vllm.weights import WEIGHTS, files_fingerprint, model_folder, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMELESS_MEDIA: Final = re.compile(r"renderer\d+-mm-\d+-")
"""vLLM numbers media instead of hashing them when both of its caches are off: such ids mean nothing elsewhere."""
_NO_EXTRAS: Final = Extras()
_ROPE_BY_LENGTH: Final = ("longrope", "su", "dynamic")
"""Kinds of RoPE whose factors depend on the length that the engine was started for."""
_FROM_FILES: Final = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf", "bitsandbytes",
    "sharded_state", "runai_streamer", "runai_streamer_sharded",
})  # fmt: skip
"""Ways of loading that take the weights from files in the model's folder."""
_PLAIN: Final = (None, "", "auto", False)
_MODEL_FIELDS: Final = (
    "quantization", "quantization_config", "model_impl", "model_class_overrides", "code_revision",
    "disable_sliding_window",
)  # fmt: skip
"""Fields of vLLM's model configuration that say how the same files are computed with."""
_MEDIA_ELSEWHERE: Final = frozenset({
    "allow_missing_mm_embeddings", "enable_mm_embeds", "interleave_mm_strings", "limit_per_prompt",
    "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc",
    "skip_mm_profiling",
})  # fmt: skip
"""Settings for media that the result does not depend on. All others count, also those that vLLM will have one day."""


def model_identity(vllm_config: Any) -> tuple[str, str, dict[str, str]]:
    """Model name, revision, and everything else about the weights that the KV depends on."""
    model, load = vllm_config.model_config, vllm_config.load_config
    name, revision = str(model.model), str(model.revision or "")
    way = _plain(getattr(load, "load_format", None) or "auto")
    extra = {
        "weights": _weights(model, load),
        "config": _config_digest(model.hf_config),
        "dtype": _plain(model.dtype),
    }
    optional = {key: getattr(model, key, None) for key in _MODEL_FIELDS}
    optional["load_format"] = None if way in {"auto", "hf", "safetensors"} else way
    optional["media"] = _media_digest(getattr(model, "multimodal_config", None))
    if _rope_depends_on_length(model.hf_config):
        optional["rope_length"] = model.max_model_len
    if way == "dummy":
        optional["seed"] = model.seed
    if (lora := getattr(vllm_config, "lora_config", None)) is not None:
        optional["adapter_dtype"] = getattr(lora, "lora_dtype", None)
    if getattr(vllm_config, "speculative_config", None) is not None:
        optional["speculative"] = _draft(vllm_config, extra["weights"])
    extra.update({key: _text(value) for key, value in optional.items() if value or value not in _PLAIN})
    return name, revision, extra


def _weights(model: Any, load: Any) -> str:
    """The fingerprint of a model's weights, or a word that no other process has."""
    way = _plain(getattr(load, "load_format", None) or "auto")
    if way == "dummy":
        return "dummy"
    name = str(getattr(model, "model_weights", None) or model.model)  # an object store's address, where it is one
    found = None
    if way in _FROM_FILES:
        revision, place = str(getattr(model, "revision", None) or ""), getattr(load, "download_dir", None)
        found = files_fingerprint(model_folder(name, revision, place))
    if found is None:
        logger.warning(
            "the weights of %s (loaded by %r) cannot be told from others: nothing that is cached now is found by the "
            "next start of this engine, or by another one. Load them from a local folder or from the Hugging Face "
            "cache to change that", name, way,
        )  # fmt: skip
        found = unknown()
    return found


def _draft(vllm_config: Any, weights: str) -> str:
    """How tokens are guessed, and with which weights: a draft model may share the pages.

    `weights`: the model's own, which some ways of guessing use.
    """
    speculative, load = vllm_config.speculative_config, vllm_config.load_config
    draft = getattr(speculative, "draft_model_config", None)
    if (
        draft is not None
        and draft is not vllm_config.model_config
        and str(draft.model) != vllm_config.model_config.model
    ):
        weights = _weights(draft, getattr(speculative, "draft_load_config", None) or load)
    return f"{_plain(getattr(speculative, 'method', None))}:{getattr(speculative, 'model', None) or ''}:{weights}"


def _media_digest(multimodal: Any) -> str | None:
    """Digest of the settings that decide what the model makes of media; None for a model of text only."""
    if multimodal is None:
        return None
    values = {key: value for key, value in vars(multimodal).items() if key not in _MEDIA_ELSEWHERE}
    if scales := values.get("mm_encoder_fp8_scale_path"):
        try:
            values["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
        except OSError:
            values["scales"] = unknown()
    return _digest(values)


def _config_digest(hf_config: Any) -> str:
    """Digest of the configuration that the engine really uses, without the fields that only say where it came from."""
    values = dict(hf_config.to_dict())
    for field in ("_name_or_path", "transformers_version", "architectures_source", "_commit_hash"):
        values.pop(field, None)
    return _digest(values)


def _digest(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _rope_depends_on_length(hf_config: Any) -> bool:
    text = json.dumps(hf_config.to_dict(), default=str)
    return any(f'"{kind}"' in text for kind in _ROPE_BY_LENGTH)


def _plain(value: object) -> str:
    """A value as text without the name of its type: `torch.bfloat16` is `bfloat16`, an enum its value."""
    return str(getattr(value, "value", value)).removeprefix("torch.")


def _text(value: object) -> str:
    """A value of a configuration as text."""
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, (dict, list)) else _plain(value)


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
        """Path and fingerprint of an adapter's files, taken when it is first used or is loaded anew in place.

        One that is named by a repository is fetched by the workers later, in whatever version there is then: it has a
        word of its own in this process.
        """
        key = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        known = self._adapters.get(key)
        if known is None or getattr(lora, "load_inplace", False):
            path = Path(lora.lora_path).expanduser()
            found = files_fingerprint(path if path.is_dir() else None, (*WEIGHTS, ".json"))
            if found is None:
                INCIDENTS.note(
                    "adapter",
                    f"{lora.lora_name} ({lora.lora_path}) is no local folder with weights: what is cached for it is "
                    "found by this process only. Give the folder that it was downloaded to to change that",
                )
            kind = ":3d" if getattr(lora, "is_3d_lora_weight", False) else ""
            known = self._adapters[key] = f"{lora.lora_path}:{found or unknown()}{kind}"
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
