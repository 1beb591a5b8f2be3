"""An engine that costs next to nothing: answers after a fixed time, one token after the other if it is asked to stream.

python -m tests.bench.proxy_child FD   serves on the listening socket of that number
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn

FIRST_TOKEN = 0.03
NEXT_TOKEN = 0.005
TOKENS = [b'data: {"id":"c","choices":[{"index":0,"text":"word %d"}]}\n\n' % number for number in range(8)]
WHOLE = b'{"id":"c","choices":[{"index":0,"text":"%s"}],"usage":{"prompt_tokens":3}}' % (b"word " * 8)


async def engine(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    stream = b'"stream":true' in body
    kind = b"text/event-stream" if stream else b"application/json"
    if scope["path"] != "/health":
        await asyncio.sleep(FIRST_TOKEN)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for token in TOKENS if stream else ():
        await send({"type": "http.response.body", "body": token, "more_body": True})
        await asyncio.sleep(NEXT_TOKEN)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if stream else WHOLE})


if __name__ == "__main__":
    uvicorn.run(engine, fd=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off", ws="none")
