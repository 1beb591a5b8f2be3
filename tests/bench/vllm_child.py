"""A vLLM in a process of its own: takes one JSON request per line on standard input, answers on descriptor 3's number.

Usage: `python -m tests.bench.vllm_child <descriptor> <JSON of LLM's arguments>`.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Answers `ready`, then each request with its seconds and what was not computed."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[2]))
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        length = request["max_tokens"]
        sampling = SamplingParams(max_tokens=length, min_tokens=length, temperature=0.0, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        begin = time.perf_counter()
        done = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answer = {
            "seconds": seconds,
            "cached": [output.num_cached_tokens or 0 for output in done],
            "answers": [list(output.outputs[0].token_ids) for output in done],
        }
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
