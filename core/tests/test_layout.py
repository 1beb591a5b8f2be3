from __future__ import annotations

import pytest

from lmkv.errors import ConfigError
from lmkv.layout import PageLayout, PageRun, canonical_json

RUNS = (PageRun(0, 0, 4096, 512), PageRun(0, 512, 4096, 512), PageRun(1, 0, 256, 256))


def layout(**changes: object) -> PageLayout:
    fields = {"name": "P", "dtype": "bfloat16", "page_tokens": 16, "runs": RUNS, "tags": (("order", "LBK"), ("a", "1"))}
    return PageLayout(**{**fields, **changes})


def test_sizes_and_starts() -> None:
    assert layout().page_bytes == 1280
    assert layout().run_starts == (0, 512, 1024)


def test_description_has_what_the_bytes_depend_on_and_nothing_else() -> None:
    assert layout().describe() == {
        "name": "P",
        "dtype": "bfloat16",
        "page_tokens": 16,
        "runs": [512, 512, 256],
        "tags": [("a", "1"), ("order", "LBK")],
    }


def test_fingerprint_ignores_where_the_engine_keeps_the_pages() -> None:
    moved = tuple(PageRun(run.buffer + 1, run.offset + 64, run.stride * 2, run.length) for run in RUNS)
    assert layout(runs=moved).fingerprint() == layout().fingerprint()
    assert layout(tags=(("a", "1"), ("order", "LBK"))).fingerprint() == layout().fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Q"},
        {"dtype": "float16"},
        {"page_tokens": 32},
        {"runs": RUNS[:2]},
        {"runs": (RUNS[2], RUNS[0], RUNS[1])},
        {"tags": (("order", "BLK"), ("a", "1"))},
        {"tags": ()},
    ],
)
def test_fingerprint_tells_apart(changes: dict[str, object]) -> None:
    assert layout(**changes).fingerprint() != layout().fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": ()}, "without runs"),
        ({"page_tokens": 0}, "0 tokens"),
        ({"runs": (PageRun(0, 0, 64, 128),)}, "stride 64"),
        ({"runs": (PageRun(0, -1, 64, 64),)}, "offset -1"),
        ({"runs": (PageRun(0, 0, 64, 0),)}, "length 0"),
        ({"tags": (("a", "1"), ("a", "2"))}, "twice"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(**changes)


def test_canonical_json() -> None:
    assert canonical_json({"ö": (1, 2), "a": 'q"\n'}) == '{"a":"q\\"\\n","\\u00f6":[1,2]}'
