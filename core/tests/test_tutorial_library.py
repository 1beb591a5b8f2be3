"""The library tutorial does what it says, line by line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "library.md"


def test_the_tutorials_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 5
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            line = text.count("\n", 0, block.start(1))
            exec(compile("\n" * line + block[1], str(TUTORIAL), "exec"), names)  # our own page
        printed = capsys.readouterr().out.splitlines()
        assert printed[:2] == ["144", "96"]
        assert "'state': 'ok'" in printed[2]
        assert printed[3] == "{'cpu': 6}"
    finally:
        if "host" in names:
            names["host"].close()


def test_torch_pages_do_as_well() -> None:
    torch = pytest.importorskip("torch", reason="lmkv[torch] is optional")
    import numpy as np

    from lmkv.gpu import CopyJob, connector_for
    from lmkv.layout import PageLayout, PageRun

    kv = torch.arange(4 * 8, dtype=torch.float32).reshape(4, 8)
    layout = PageLayout("torch", "float32", 2, (PageRun(0, 0, 32, 32),))
    connector = connector_for("cpu", layout, [kv.numpy()])
    frame = bytearray(2 * layout.page_bytes)
    connector.gather([CopyJob(np.array([3, 1]), memoryview(frame), 2)])
    assert bytes(frame) == kv[[3, 1]].numpy().tobytes()
    connector.scatter([CopyJob(np.array([0, 2]), memoryview(frame), 2)])
    assert torch.equal(kv[[0, 2]], kv[[3, 1]])
