"""What the lossy codec `fp8` does to answers: `python -m tests.bench.quality`, some minutes.

SmolLM2 computes in float32 (so that sums in another order change nothing) and reads the first part of each prompt's KV
from what a cache would give back: rounded to bfloat16, as a lossless codec keeps it, or coded by `fp8` besides.
"""

from __future__ import annotations

import math
import random
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from tests.bench import kv

from lmkv.codec.fp8 import Fp8Codec
from lmkv_vllm.demo.documents import SUBJECTS, document, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

CACHED, SCORED = 768, 256
"""Tokens of each text that come from the cache, and that are scored after them."""
ANSWER = 32
LENGTHS = (500, 700, 900, 1100)


def lossless(payload: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """As it is."""
    return payload


def fp8(payload: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """There and back."""
    codec, about = Fp8Codec(), kv.about(payload)
    encoded = b"".join(codec.encode(memoryview(payload.reshape(-1).view(np.uint8)), about))
    back = np.empty_like(payload)
    codec.decode(memoryview(encoded), back.reshape(-1).view(np.uint8).data, about)
    return back


def cached(cache: Any, tokens: int, coding: Callable[[NDArray[np.uint16]], NDArray[np.uint16]]) -> Any:
    """The cache of the first `tokens` (whole chunks) after `coding`."""
    from transformers import DynamicCache

    bits = kv.bits(cache)
    parts = [coding(kv.chunk(bits, first)) for first in range(0, tokens, kv.CHUNK_TOKENS)]
    whole = np.concatenate(parts, axis=1).transpose(0, 3, 2, 1, 4)  # layers, K and V, heads, tokens, channels
    floats = torch.from_numpy(np.ascontiguousarray(whole).view(np.int16)).view(torch.bfloat16).float()
    made = DynamicCache()
    for number, layer in enumerate(floats):
        made.update(layer[0][None], layer[1][None], number)
    return made


def perplexity(model: Any, ids: torch.Tensor) -> tuple[float, ...]:
    """Mean negative log-likelihood of the scored tokens for each coding."""
    whole = model(ids[:, :CACHED], use_cache=True, logits_to_keep=1).past_key_values
    losses = []
    for coding in (lossless, fp8):
        logits = model(ids[:, CACHED:], past_key_values=cached(whole, CACHED, coding), use_cache=True).logits[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, CACHED + 1 :])))
    return tuple(losses)


def answers(model: Any, ids: torch.Tensor) -> list[list[int]]:
    """The greedy answer for each coding; all whole chunks but the last token come from the cache."""
    tokens = (ids.shape[1] - 1) // kv.CHUNK_TOKENS * kv.CHUNK_TOKENS
    whole = model(ids[:, :tokens], use_cache=True, logits_to_keep=1).past_key_values
    found = []
    for coding in (lossless, fp8):
        cache, step, answer = cached(whole, tokens, coding), ids[:, tokens:], []
        for _ in range(ANSWER):
            best = int(model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
            answer.append(best)
            step = torch.tensor([[best]])
        found.append(answer)
    return found


@torch.no_grad()
def main() -> int:
    """Print the figures of `docs/reference/codecs.md`."""
    say = partial(Console().print, highlight=False, soft_wrap=True)
    tokenizer, model = kv.load(torch.float32)
    ids = tokenizer(kv.text(), return_tensors="pt").input_ids
    starts = range(0, ids.shape[1] - CACHED - SCORED, (CACHED + SCORED) // 2)
    losses = np.array([perplexity(model, ids[:, at : at + CACHED + SCORED]) for at in starts])
    exact, fuzzy = (math.exp(each) for each in losses.mean(axis=0))
    say(f"perplexity of {len(losses)} x {SCORED} tokens after {CACHED} cached ones:")
    say(f"  lossless {exact:.3f}, fp8 {fuzzy:.3f}: {100 * (fuzzy / exact - 1):+.2f} %")
    say(f"  by text: {', '.join(f'{100 * (math.exp(b - a) - 1):+.2f}' for a, b in losses)} %")
    same, until = 0, []
    asked = [(s, n, q) for s in SUBJECTS for n in LENGTHS for q in s.questions]
    random.Random(0).shuffle(asked)
    for number, (subject, length, question) in enumerate(asked, 1):
        said = prompt(document(subject, length, lambda text: len(tokenizer(text).input_ids)), question)
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": said}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        one, two = answers(model, chat["input_ids"])
        same += one == two
        until.append(next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), ANSWER))
        say(f"  {number} of {len(asked)}: alike for {until[-1]} tokens")
    say(f"greedy answers of {ANSWER} tokens: {same} of {len(asked)} alike, on average for {np.mean(until):.1f} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
