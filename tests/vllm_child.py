"""A real vLLM that does what it is told: `vllm_child.py COMMANDS REPLIES`, two open file descriptors, JSON lines.

A program of its own, so that vLLM's globals and warnings stay out of pytest; see `vllm_rig`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from run_engine import Engine, health, wait_quiet


class Child:
    """One engine and its commands."""

    def __init__(self, stack: dict[str, Any] | None = None, **more: Any) -> None:
        self.stack = stack
        self.engine = Engine(stack, **more)
        self._numbers = 0

    def ask(
        self, prompts: dict[str, list[int]], max_tokens: int = 24, transfers: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """All at once; name → answer, tokens not computed, seconds. Also the longest step of the engine.

        `transfers`: `kv_transfer_params` of those that have some.
        """
        from vllm import SamplingParams

        core = self.engine.llm.llm_engine
        names: dict[str, str] = {}
        begin = time.monotonic()
        for name, prompt in prompts.items():
            self._numbers += 1
            names[str(self._numbers)] = name
            extra = {"kv_transfer_params": transfers[name]} if transfers and name in transfers else None
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
            core.add_request(str(self._numbers), {"prompt_token_ids": prompt}, params)
        out: dict[str, Any] = {}
        longest = 0.0
        while core.has_unfinished_requests():
            before = time.monotonic()
            done = core.step()
            took = time.monotonic() - before
            longest = max(longest, took)
            if took < 0.001:  # every request waits for its load: don't take the core from those who load
                time.sleep(0.001)
            for output in done:
                if output.finished:
                    out[names[output.request_id.split("-")[0]]] = {
                        "answer": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        "transfer": output.kv_transfer_params,
                        "seconds": time.monotonic() - begin,
                    }
        return {"answers": out, "longest_step": longest, "seconds": time.monotonic() - begin}

    def quiet(self) -> dict[str, Any]:
        """Wait until what was saved is in all tiers that take it; then what the service says of itself."""
        if self.stack is None:
            return {}
        with contextlib.suppress(Exception):
            wait_quiet(self.stack)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            now = health(self.stack)
            waiting = [v for k, v in now["counters"].items() if k.startswith("lmkv_tier_queue_calls")]
            if not any(waiting):
                break
            time.sleep(0.05)
        return health(self.stack)

    def health(self) -> dict[str, Any]:
        """What the service says of itself now."""
        return {} if self.stack is None else health(self.stack)


def main() -> None:
    commands, replies = (os.fdopen(int(fd), mode) for fd, mode in zip(sys.argv[1:], "rw", strict=True))
    child: Child | None = None
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        if name == "start":
            child, reply = Child(**command), {}
        else:
            reply = getattr(child, name)(**command)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
