from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.errors import ConfigError
from lmkv.gpu import CopyJob, CPUConnector, connector_for, strided
from lmkv.layout import PageLayout, PageRun

Bytes = npt.NDArray[np.uint8]


@dataclass
class Engine:
    """Pages in buffers, and the slow, obvious way to read and write them."""

    layout: PageLayout
    buffers: list[Bytes]
    pages: int

    def page(self, run: PageRun, number: int) -> Bytes:
        at = run.offset + number * run.stride
        return self.buffers[run.buffer][at : at + run.length]

    def payload(self, ids: list[int]) -> bytes:
        return b"".join(self.page(run, i).tobytes() for run in self.layout.runs for i in ids)


def buffer(nbytes: int, seed: int, shift: int = 0) -> Bytes:
    """Random bytes that start `shift` bytes into a page of memory."""
    raw = np.empty(nbytes + 8192, np.uint8)
    start = -raw.ctypes.data % 4096 + shift
    raw[start : start + nbytes] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return raw[start : start + nbytes]


def engine(kind: str, layers: int, pages: int, length: int, *, shift: int = 0, gap: int = 24) -> Engine:
    """Layouts as engines have them. `length`: bytes of a page in one layer (K and V apart: half of it each)."""
    runs: list[PageRun]
    sizes: list[int]
    if kind == "one run":  # BLHNC: a page of all layers lies together
        runs, sizes = [PageRun(0, 0, layers * length, layers * length)], [layers * length * pages]
    elif kind == "layer by layer":  # LBHNC in one buffer
        runs = [PageRun(0, i * pages * length, length, length) for i in range(layers)]
        sizes = [layers * pages * length]
    elif kind == "blocks of layers":  # BLHNC, declared layer by layer
        runs = [PageRun(0, i * length, layers * length, length) for i in range(layers)]
        sizes = [layers * pages * length]
    elif kind == "buffer per layer":
        runs, sizes = [PageRun(i, 0, length, length) for i in range(layers)], [pages * length] * layers
    elif kind == "k and v apart":  # [2, pages, …] per layer
        runs = [PageRun(i, kv * pages * length, length, length) for i in range(layers) for kv in range(2)]
        sizes = [2 * pages * length] * layers
    elif kind == "k and v in turn, v shorter":  # [pages, {k, v}] per layer
        short = max(1, length // 3)
        runs = [PageRun(i, kv * length, length + short, (length, short)[kv]) for i in range(layers) for kv in range(2)]
        sizes = [pages * (length + short)] * layers
    else:
        assert kind == "with a gap"  # other data between the pages, and before the first
        runs = [PageRun(0, 8 + i * pages * (length + gap), length + gap, length) for i in range(layers)]
        sizes = [8 + layers * pages * (length + gap)]
    layout = PageLayout(kind, "uint8", 16, tuple(runs))
    return Engine(layout, [buffer(n, i, shift) for i, n in enumerate(sizes)], pages)


KINDS = (
    "one run",
    "layer by layer",
    "blocks of layers",
    "buffer per layer",
    "k and v apart",
    "k and v in turn, v shorter",
    "with a gap",
)


def round_trip(e: Engine, ids: list[int], held: int, first: int, *, window: range | None, shift: int) -> None:
    """Gather into a frame of `held` pages and scatter into other pages; every byte must be where it belongs."""
    connector = CPUConnector(e.layout, e.buffers)
    assert connector.num_pages == e.pages
    runs = range(len(e.layout.runs)) if window is None else window
    memory = buffer(held * e.layout.page_bytes + 100, 99, shift)
    expected = memory.copy()
    for r in runs:
        run = e.layout.runs[r]
        for j, page in enumerate(ids):
            at = held * e.layout.run_starts[r] + (first + j) * run.length
            expected[at : at + run.length] = e.page(run, page)
    before = [b.copy() for b in e.buffers]
    job = CopyJob(np.array(ids, np.int64), memory.data, held, first)
    connector.gather([job], layers=window)
    assert (memory == expected).all()
    assert all((a == b).all() for a, b in zip(before, e.buffers, strict=True))

    target = Engine(e.layout, [buffer(len(b), 7 + i, 16) for i, b in enumerate(e.buffers)], e.pages)
    wanted = Engine(e.layout, [b.copy() for b in target.buffers], e.pages)
    to = ids[1:] + ids[:1]
    for r in runs:
        for source, page in zip(ids, to, strict=True):
            wanted.page(e.layout.runs[r], page)[:] = e.page(e.layout.runs[r], source)
    CPUConnector(target.layout, target.buffers).scatter(
        [CopyJob(np.array(to, np.int64), memory.data, held, first)], layers=window
    )
    assert all((a == b).all() for a, b in zip(target.buffers, wanted.buffers, strict=True))
    assert (memory == expected).all()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_gather_and_scatter_are_bit_exact_for_any_layout(data: st.DataObject) -> None:
    draw = data.draw
    pages = draw(st.integers(1, 12))
    length = draw(st.sampled_from((1, 3, 7, 64, 100, 256, 520, 768, 4096, 8192)))
    e = engine(
        draw(st.sampled_from(KINDS)),
        draw(st.integers(1, 4)),
        pages,
        length,
        shift=draw(st.sampled_from((0, 1, 8, 16, 64))),
        gap=draw(st.sampled_from((1, 24, 256, 512, 4096))),
    )
    if draw(st.booleans()):
        begin = draw(st.integers(0, pages - 1))
        ids = list(range(begin, draw(st.integers(begin + 1, pages))))
    else:
        ids = draw(st.permutations(range(pages)))[: draw(st.integers(0, pages))]
    first, rest = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    runs = len(e.layout.runs)
    window = None
    if draw(st.booleans()):
        begin = draw(st.integers(0, runs))
        window = range(begin, draw(st.integers(begin, runs)))
    round_trip(e, ids, first + len(ids) + rest, first, window=window, shift=draw(st.sampled_from((0, 1, 8, 48))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gathered_frame_is_the_payload_that_the_format_says(kind: str) -> None:
    e = engine(kind, 3, 9, 520)
    connector = CPUConnector(e.layout, e.buffers)
    for ids in ([4, 0, 8, 1], [3, 4, 5, 6], [2]):
        memory = bytearray(len(ids) * e.layout.page_bytes)
        connector.gather([CopyJob(np.array(ids), memoryview(memory), len(ids))])
        assert bytes(memory) == e.payload(ids)


def test_layer_by_layer_gives_the_same_frame() -> None:
    e = engine("k and v apart", 4, 9, 512)
    connector = CPUConnector(e.layout, e.buffers)
    ids = [7, 2, 5]
    memory = bytearray(len(ids) * e.layout.page_bytes)
    for layer in range(4):
        connector.gather([CopyJob(np.array(ids), memoryview(memory), 3)], layers=range(2 * layer, 2 * layer + 2))
    assert bytes(memory) == e.payload(ids)


def test_a_batch_copies_every_job_and_more_ids_than_a_small_list() -> None:
    e = engine("layer by layer", 2, 400, 64)
    connector = CPUConnector(e.layout, e.buffers)
    draw = np.random.default_rng(1)
    batch = [draw.permutation(400)[:n].tolist() for n in (200, 0, 70, 1)] + [list(range(100, 300))]
    memories = [bytearray(len(ids) * e.layout.page_bytes) for ids in batch]
    connector.gather(
        [CopyJob(np.array(i, np.int64), memoryview(m), len(i)) for i, m in zip(batch, memories, strict=True)]
    )
    assert [bytes(m) for m in memories] == [e.payload(ids) for ids in batch]


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("kind", ["layer by layer", "buffer per layer", "with a gap"])
def test_targets_just_after_their_source_modulo_a_page_avoid_memcpy(
    kind: str, consecutive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_words: list[bool] = []
    original = strided._copy

    def spy(target: Any, source: Any, *, words: bool) -> None:
        by_words.append(words)
        original(target, source, words=words)

    monkeypatch.setattr(strided, "_copy", spy)
    e = engine(kind, 2, 6, 8192, shift=16 - 8 * (kind == "with a gap"), gap=4096)
    connector = CPUConnector(e.layout, e.buffers)
    ids = [2, 3, 4] if consecutive else [4, 0, 2]
    memory = buffer(3 * e.layout.page_bytes, 5)
    connector.scatter([CopyJob(np.array(ids), memory.data, 3)])
    assert by_words
    assert all(by_words)
    assert e.payload(ids) == memory.tobytes()
    by_words.clear()
    connector.gather([CopyJob(np.array(ids), memory.data, 3)])
    assert not any(by_words)


BAD_JOBS: list[tuple[Any, int, int, int, str]] = [
    ([0, 10], 2, 0, 2, "page ids 0 to 10, but the engine has pages 0 to 9"),
    ([-1, 3], 2, 0, 2, "page ids -1 to 3"),
    ([*range(99), 10], 100, 0, 100, "page ids 0 to 98"),
    ([0, 1, 2], 2, 0, 2, "pages 0 to 3 of a frame that holds 2"),
    ([0, 1], 3, 2, 3, "pages 2 to 4 of a frame that holds 3"),
    ([0], 2, -1, 2, "pages -1 to 0"),
    ([0], 3, 0, 2, "memory of 256 bytes for a frame of 3 pages of 128 bytes"),
    (np.array([0], np.int32), 1, 0, 1, "one-dimensional int64, not 1-dimensional int32"),
    (np.array([[0]]), 1, 0, 1, "not 2-dimensional"),
]


@pytest.mark.parametrize(("ids", "held", "first", "room", "message"), BAD_JOBS)
def test_what_does_not_fit_is_refused_before_anything_is_copied(
    ids: Any, held: int, first: int, room: int, message: str
) -> None:
    e = engine("layer by layer", 2, 10, 64)
    connector = CPUConnector(e.layout, e.buffers)
    memory = bytearray(room * e.layout.page_bytes)
    fine = bytearray(e.layout.page_bytes)
    before = e.buffers[0].copy()
    pages = ids if isinstance(ids, np.ndarray) else np.array(ids, np.int64)
    jobs = [CopyJob(np.array([1]), memoryview(fine), 1), CopyJob(pages, memoryview(memory), held, first)]
    for copy in (connector.gather, connector.scatter):
        with pytest.raises(ValueError, match=message):
            copy(jobs)
    assert not any(fine)
    assert (e.buffers[0] == before).all()


def test_memory_that_cannot_be_written_or_has_holes_is_refused() -> None:
    e = engine("layer by layer", 2, 10, 64)
    connector = CPUConnector(e.layout, e.buffers)
    one = np.array([1])
    constant = CopyJob(one, memoryview(bytes(128)), 1)
    connector.scatter([constant])
    with pytest.raises(ValueError, match="contiguous and writable"):
        connector.gather([constant])
    with pytest.raises(ValueError, match="contiguous"):
        connector.scatter([CopyJob(one, memoryview(bytearray(256))[::2], 1)])


@pytest.mark.parametrize("layers", [range(3), range(-1, 1), range(0, 2, 2), range(2, 1)])
def test_layers_outside_the_layout_are_refused(layers: range) -> None:
    e = engine("layer by layer", 2, 10, 64)
    connector = CPUConnector(e.layout, e.buffers)
    with pytest.raises(ValueError, match="no range of the layout's 2 runs"):
        connector.gather([], layers=layers)


def test_buffers_that_do_not_fit_the_layout_are_refused() -> None:
    layout = PageLayout("x", "uint8", 16, (PageRun(1, 100, 64, 64),))
    good = np.zeros(1000, np.uint8)
    frozen = np.zeros(1000, np.uint8)
    frozen.flags.writeable = False
    for buffers, message in (
        ([good], "in buffer 1, but there are 1 buffers"),
        ([good, good[:163]], "needs bytes 100 to 164 of buffer 1, which has 163"),
        ([good, good[::2]], "buffer 1 must be contiguous"),
        ([good, frozen], "buffer 1 must be contiguous and writable"),
    ):
        with pytest.raises(ConfigError, match=message):
            CPUConnector(layout, buffers)
    assert CPUConnector(layout, [good, good[:164]]).num_pages == 1
    assert CPUConnector(layout, [good, memoryview(bytearray(292))]).num_pages == 3


def test_the_connector_is_chosen_by_device() -> None:
    e = engine("one run", 1, 2, 64)
    assert isinstance(connector_for("cpu", e.layout, e.buffers), CPUConnector)
    with pytest.raises(ConfigError, match="'cuda:1' is not supported"):
        connector_for("cuda:1", e.layout, e.buffers)


def test_no_torch_is_imported() -> None:
    code = "import sys, lmkv.gpu; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
