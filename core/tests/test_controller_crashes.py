"""A controller that is killed, at each step of a move, and started anew."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from controller_process import ControllerProcess
from controller_rig import CHUNK, SECONDS, Nodes, digests, namespace, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lmkv.agent import messages as m

SPACE = namespace()
PROMPT = list(range(1, 300 * CHUNK + 1))
CHUNKS = digests(PROMPT, SPACE)
"""More than are moved at once, so that a kill may come in the first part or in the second."""
MOVE: dict[str, Any] = {
    "model": "m",
    "tokens": PROMPT,
    "source": {"node": "a", "tier": "ram"},
    "target": {"node": "b", "tier": "ram"},
}

POINTS = [
    (moment, kind, part)
    for part in (0, 1)
    for kind in ("Fetch", "Drop", "UnpinChunks")
    for moment in ("before", "after", "told")
]
QUICK = [("after", "Drop", 0)]
"""It is gone at the source, and nobody has written that down."""


def spread(nodes: Nodes) -> dict[str, int]:
    return {node.name: len(node.tiers[0].of(SPACE.id) & set(CHUNKS)) for node in nodes.values()}


def killed_at(point: tuple[str, str, int], folder: Path) -> None:
    """Move, kill the controller at that point, start it anew: the move ends as if nothing had been."""
    moment, kind, part = point
    with ControllerProcess(folder, "--journal", folder / "jobs") as controller, Nodes() as nodes:
        a, b = (nodes.start(name, controller, SPACE) for name in "ab")
        a.store(CHUNKS, SPACE)
        killed = threading.Event()

        def hook(at: str) -> Callable[[str, m.Command], bool]:
            def kill(job: str, command: m.Command) -> bool:
                if type(command).__name__ == kind and f".{part}." in job and not killed.is_set() and at == moment:
                    if at == "told":
                        threading.Timer(0.002, lambda: (controller.kill(), killed.set())).start()
                        return True
                    controller.kill()
                    killed.set()
                return True

            return kill

        for node in (a, b):
            node.before, node.after = hook("before"), hook("after" if moment == "after" else "told")
        job = controller.post("move", MOVE, wait=0, headers={"Idempotency-Key": "once"})["id"]
        assert killed.wait(SECONDS)
        seen = spread(nodes)
        assert seen["a"] + seen["b"] >= len(CHUNKS)
        controller.restart()
        assert controller.post("move", MOVE, wait=0, headers={"Idempotency-Key": "once"})["id"] == job
        ended = controller.get(f"/v1/jobs/{job}", params={"wait": SECONDS})
        assert (ended["state"], ended["done"], ended["failed"]) == ("done", len(CHUNKS), 0)
        assert spread(nodes) == {"a": 0, "b": len(CHUNKS)}
        assert not nodes.lost, "a chunk was taken away while it was safe nowhere else"
        assert not b.pins
        until(lambda: len(controller.post("lookup", MOVE_LOOKUP)["nodes"]) == 1, "the directory follows")
        assert controller.post("lookup", MOVE_LOOKUP)["nodes"][0]["node"] == "b"


MOVE_LOOKUP = {"model": "m", "tokens": PROMPT}


@pytest.mark.parametrize("point", QUICK, ids=lambda point: "-".join(map(str, point)))
def test_a_killed_controller_goes_on_with_its_move(point: tuple[str, str, int], tmp_path: Path) -> None:
    killed_at(point, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS, ids=lambda point: "-".join(map(str, point)))
def test_killed_at_every_step(point: tuple[str, str, int], tmp_path: Path) -> None:
    killed_at(point, tmp_path)
