"""Cases from the field: what a key must tell apart, on the real stack."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fake_engine import CHUNK, PAGE, SHAPE, FakeEngine, Request, Shape, namespace, tokens

from lmkv.errors import ConfigError
from lmkv.gpu import CPUConnector
from lmkv.keys import Extras, MediaSpan, Namespace
from lmkv.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_engine import Node

IMAGE = 7


@pytest.mark.parametrize("stored", range(6))
def test_a02_fields_do_not_mix(node: Callable[..., Node], stored: int) -> None:
    """What is stored under one adapter, version, salt or image is found under no other."""
    variants = [
        Extras(),
        Extras(adapter="x", adapter_version="1"),
        Extras(adapter="x", adapter_version="2"),
        Extras(salt="x"),
        Extras(media=(MediaSpan("x", 0, 8),)),
        Extras(adapter="x", adapter_version="1", salt="x"),
    ]
    engine = node().engine()
    assert engine.store(tokens(8), extras=variants[stored]) == 8
    found = [engine.find(tokens(8), extras=extras) for extras in variants]
    assert found == [8 if number == stored else 0 for number in range(len(variants))]


def test_a03_two_images_one_question(node: Callable[..., Node]) -> None:
    """12 tokens with an image in the middle: another image of the same last 16 bits gets the text before it only."""
    prompt = [1, 2, 3, 4, IMAGE, IMAGE, IMAGE, IMAGE, 5, 6, 7, 8]
    first = Extras(media=(MediaSpan("a" * 60 + "ffff", 4, 4),))
    second = Extras(media=(MediaSpan("b" * 60 + "ffff", 4, 4),))
    engine = node().engine()
    engine.store(prompt, extras=first)
    assert engine.find(prompt, extras=second) == 4
    assert engine.find(prompt, extras=first) == 12
    request = Request([engine], prompt, extras=first).queue().look_up()
    assert request.offered == 10, "11, rounded down to whole pages"
    request.allocate().load().run().finish()
    assert engine.load(prompt, extras=second) == 4


def test_a04_dtype_and_revision(node: Callable[..., Node], tmp_path: Path) -> None:
    """Another dtype or revision finds nothing, and nothing is read from the disk."""
    here = node(tmp_path)
    here.engine().store(tokens(8))
    here.settle()
    for other in (namespace(kv_dtype="fp8"), namespace(revision="r2")):
        engine = here.engine(space=other)
        assert engine.find(tokens(8)) == 0
        assert engine.load(tokens(8)) == 0
    here.settle()
    assert here.counter("lmkv_tier_operations_total", tier="disk", op="get", outcome="ok") == 0
    assert here.counter("lmkv_misses_total", reason="namespace") > 0


@pytest.mark.parametrize(
    "model", ["org/model/name", "org/model-SEP-name", "org%2Fmodel/name", "x" * 300, "modèle-模型", "../../up", ""]
)
@pytest.mark.parametrize("salt", ["a/b", "..", ""])
def test_a05_file_names(node: Callable[..., Node], tmp_path: Path, model: str, salt: str) -> None:
    """Any model name and any salt: the frames come back as themselves, and every path lies inside the folder."""
    folder = tmp_path / "below" / "frames"
    folder.parent.mkdir()
    here = node(folder, ram=None)
    engine = here.engine(space=namespace(model=model))
    other = here.engine(space=namespace(model="plain"))
    extras = Extras(salt=salt)
    engine.store(tokens(8), extras=extras)
    other.store(tokens(8), extras=extras)
    here.settle()
    assert engine.load(tokens(8), extras=extras) == 8
    assert other.load(tokens(8), extras=extras) == 8
    assert {path.name for path in tmp_path.iterdir()} == {"below"}
    assert {path.name for path in folder.parent.iterdir()} == {"frames"}
    names = {part for path in folder.rglob("*") for part in path.relative_to(folder).parts}
    assert all(len(name.encode()) <= 255 and name.isascii() for name in names)


def test_a06_twin_shapes(node: Callable[..., Node]) -> None:
    """Two layouts of the same sizes: a frame of one is never copied into the pages of the other."""
    here = node()
    p, q = Shape(order="blocks, block, K|V, heads*dim"), Shape(order="blocks, block, heads, 2*dim")
    assert p.layout.page_bytes == q.layout.page_bytes
    stored, asks = here.engine(shape=p), here.engine(shape=q)
    assert stored.store(tokens(8)) == 8
    assert asks.find(tokens(8)) == 0
    assert asks.load(tokens(8)) == 0
    assert here.counter("lmkv_misses_total", reason="namespace") > 0, "refused and counted"
    assert stored.load(tokens(8)) == 8
    with pytest.raises(ConfigError, match="page layout"):  # pages that are not as they are declared
        FakeEngine(here.client(), space=namespace(p), shape=q)


def test_a06_no_layout_no_registration(node: Callable[..., Node]) -> None:
    with pytest.raises(ConfigError, match="must declare its layout"):
        PageLayout("none", "bf16", PAGE, ())
    with pytest.raises(ConfigError, match="one per shard"):
        Namespace("m", "r", "bf16", (), (), CHUNK, PAGE)
    undeclared = {**SHAPE.layout.describe(), "runs": []}
    with pytest.raises(ConfigError, match="runs of 0 bytes"):
        replace(namespace(), layouts=(undeclared,))  # type: ignore[arg-type]


def test_a07_one_layer_more(node: Callable[..., Node], tmp_path: Path) -> None:
    """The same model with a draft layer more finds nothing, and has its own frames after storing anew."""
    here = node(tmp_path)
    four, five = here.engine(shape=Shape(layers=4)), here.engine(shape=Shape(layers=5))
    four.store(tokens(8))
    assert five.find(tokens(8)) == 0
    assert here.counter("lmkv_misses_total", reason="namespace") > 0
    five.store(tokens(8))
    assert (five.load(tokens(8)), four.load(tokens(8))) == (8, 8)


def test_a34_chunk_that_is_no_whole_number_of_pages() -> None:
    """Refused when it is declared, with the numbers."""
    layout = replace(SHAPE.layout, page_tokens=544)
    with pytest.raises(ConfigError, match="544") as caught:
        Namespace("m", "r", "bf16", (layout.describe(),), (layout.page_bytes,), 256, 544)
    assert "256" in str(caught.value)


def test_a06_a_connector_needs_memory_for_its_layout() -> None:
    with pytest.raises(ConfigError, match="0 buffers"):
        CPUConnector(SHAPE.layout, [])
