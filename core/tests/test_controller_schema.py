"""The OpenAPI schema says what the controller does, whatever is sent: made-up requests, right and wrong ones."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from controller_rig import Controller, Nodes, namespace
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from lmkv.cli.controller import add_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "a-token-of-sixteen-characters"
QUICK = settings(max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck])
THOROUGH = settings(QUICK, max_examples=100)
CONFIG = SchemathesisConfig.from_dict(
    {
        # Names that nobody has (404) and requests that contradict what is there (409) are right as requests.
        "checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "404", "409"]}},
    }
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"tester operate {TOKEN}\n")
    with Controller(tokens=tokens) as controller, Nodes() as nodes:
        controller.client.headers["Authorization"] = f"Bearer {TOKEN}"
        nodes.start("a", controller, namespace(), token=TOKEN)
        yield controller


@pytest.fixture(scope="module")
def described(running: Controller) -> Any:
    schema = schemathesis.openapi.from_dict(running.get("/v1/openapi.json"), config=CONFIG)
    schema.config.update(base_url=running.url)
    return schema


OPERATIONS = {
    "/metrics": ["get"],
    "/v1/clear": ["post"],
    "/v1/compress": ["post"],
    "/v1/copy": ["post"],
    "/v1/decompress": ["post"],
    "/v1/health": ["get"],
    "/v1/jobs": ["get"],
    "/v1/jobs/{job}": ["get", "delete"],
    "/v1/lookup": ["post"],
    "/v1/move": ["post"],
    "/v1/nodes": ["get"],
    "/v1/pin": ["post"],
    "/v1/unpin": ["post"],
}
EACH = [(path, method, mode) for path, methods in OPERATIONS.items() for method in methods for mode in GenerationMode
        if (mode is GenerationMode.POSITIVE or path not in {"/metrics", "/v1/health", "/v1/nodes"})]  # fmt: skip


FEW = [each for each in EACH if each[0] == "/v1/move"]
"""Bodies of the others have the same parts."""

pytestmark = pytest.mark.filterwarnings(
    # The fake node's WebSocket, in another thread, draws random numbers meanwhile.
    "ignore:Do not use the `random` module inside strategies"
)


def test_every_route_is_described(described: Any) -> None:
    found = {
        path: [m for m in item if m in {"get", "post", "delete"}]
        for path, item in described.raw_schema["paths"].items()
    }
    assert found == OPERATIONS


def ask(described: Any, path: str, method: str, mode: GenerationMode, how: settings) -> None:
    @how
    @given(described[path][method.upper()].as_strategy(generation_mode=mode))
    def made_up(case: Any) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})

    made_up()


@pytest.mark.parametrize(("path", "method", "mode"), FEW)
def test_made_up_requests(path: str, method: str, mode: GenerationMode, described: Any) -> None:
    ask(described, path, method, mode, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), EACH)
def test_many_made_up_requests(path: str, method: str, mode: GenerationMode, described: Any) -> None:
    ask(described, path, method, mode, THOROUGH)


def test_the_reference_page_has_every_route_option_and_kind(described: Any) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "reference" / "controller-api.md").read_text(encoding="utf-8")
    for path, methods in OPERATIONS.items():
        for method in methods:
            assert f"| `{method.upper()} {path}` |" in page, (method, path)
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        assert f"`{action.option_strings[0]}" in page, action.option_strings
    sources = "".join(each.read_text(encoding="utf-8") for each in (root / "core/src/lmkv/controller").glob("*.py"))
    kinds = {*re.findall(r'conflict\("([\w-]+)"', sources), *re.findall(r'unknown\("(\w+)"', sources)}
    assert len(kinds) > 8
    for kind in kinds:
        assert f"`{kind}`" in page or f"`unknown-{kind}`" in page, kind
