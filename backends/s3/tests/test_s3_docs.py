"""The reference says what the options are."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import PydanticUndefined

from lmkv.units import shown
from lmkv_backend_s3.options import S3Options

ROOT = Path(__file__).resolve().parents[3]


def test_every_option_is_documented_as_it_is() -> None:
    text = (ROOT / "docs" / "reference" / "backend-s3.md").read_text(encoding="utf-8")
    table = text.partition("| option | default | meaning |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    expected = []
    for name, field in S3Options.model_fields.items():
        if field.default is PydanticUndefined:
            default = "required"
        elif field.default is None:
            default = "none"
        else:
            default = f"`{shown(field.default, (*field.metadata, field.annotation))}`"
        expected.append(f"| `{name}` | {default} | {field.description} |")
    assert table.splitlines() == expected


def test_policy_of_the_how_to_names_what_is_used() -> None:
    """Each right that the backend needs, and none that it does not."""
    text = (ROOT / "docs" / "how-to" / "s3.md").read_text(encoding="utf-8")
    for right in ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload", "ListBucket"):
        assert f'"s3:{right}"' in text
    assert '"s3:*"' not in text
