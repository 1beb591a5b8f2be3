"""A node in a process of its own: stores chunks, says where it listens, serves until its standard input ends.

python peer_child.py PAGE_BYTES CHUNKS [key=value of the section peer …]
"""

from __future__ import annotations

import json
import sys

import numpy as np
from storage_rig import chain, namespace

from lmkv.config import load_config
from lmkv.frame import frame_bytes
from lmkv.plugins import PluginHost
from lmkv.service import protocol as p
from lmkv.service.host import LocalClient, ThreadHost


def say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    page_bytes, chunks = int(sys.argv[1]), int(sys.argv[2])
    space, keys = namespace(page_bytes=page_bytes), chain(range(4 * chunks))
    frame = frame_bytes(2 * page_bytes, 1)
    peer = {"listen": "127.0.0.1:0", "node": "child", "transports": ["tcp"], "share": "100%"}
    for pair in sys.argv[3:]:
        name, value = pair.split("=", 1)
        peer[name] = value.split(",") if name == "transports" else value
    config = load_config(
        {
            "chunk_tokens": 4,
            "pool": {"size": max(64 << 20, 8 * frame * chunks), "prefault": False, "hugepages": "off"},
            "tiers": [{"backend": "cpu", "capacity": "100%"}],
            "peer": peer,
        },
        host=PluginHost.discover(),
        environ={},
    )
    host = ThreadHost(config)
    client = LocalClient(host, "child")
    connection = client.connection()
    connection.call(p.Register(space.json())).result(20)
    frames = tuple(p.NewFrame(digest, keys.parent(i), 2, keys.prefixes(i)[0]) for i, digest in enumerate(keys.digests))
    reserved = connection.call(p.Reserve(space.id, 0, frames)).result(20)
    for digest, offset, length in zip(keys.digests, reserved.offsets, reserved.lengths, strict=True):
        noise = np.random.default_rng(int.from_bytes(digest[:4], "little"))
        connection.pool.cut(offset, length)[:] = noise.integers(0, 256, length, dtype=np.uint8).data
    connection.send(p.Commit(reserved.reservation))
    connection.call(p.GetHealth()).result(20)
    node = host.storage.peer
    assert node is not None
    say({"address": node.address})
    sys.stdin.read()
    ram = host.storage.manager.stack.ram
    say({"used": 0 if ram is None else ram.used})
    client.close()
    host.close()


if __name__ == "__main__":
    main()
