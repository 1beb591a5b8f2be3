"""The demo's parts, without a vLLM; and once, slowly, the demo itself."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from lmkv_vllm.demo import models, passes, prefill_decode, sharing
from lmkv_vllm.demo.documents import SUBJECTS, document
from lmkv_vllm.demo.report import PASSES, Report, Row
from lmkv_vllm.demo.server import Answer, Server, ServerError

if TYPE_CHECKING:
    from pathlib import Path


def words(text: str) -> int:
    return len(text.split())


def answered(texts: dict[str, str], hits: dict[str, dict[str, int]]) -> Report:
    row = Row("Lighthouse log", "Who?")
    report = Report(Console(quiet=True), [row])
    for name, text in texts.items():
        report.answered(row, name, Answer(text, 0.1, 2000, 1984), hits.get(name, {}))
    return report


def test_documents_are_as_long_as_asked_and_the_same_every_time() -> None:
    for subject in SUBJECTS:
        text = document(subject, 1500, words)
        assert 1500 <= words(text) < 1700
        assert text == document(subject, 1500, words)
        assert subject.opening in text


def test_a_run_is_good_when_answers_agree_and_every_tier_gave_something() -> None:
    report = answered(dict.fromkeys(PASSES, "Marta"), {"ram": {"ram": 1984}, "disk": {"disk": 1984}})
    assert report.faults() == []


def test_a_run_is_bad_when_an_answer_differs() -> None:
    texts = {"cold": "Marta", "ram": "Marta", "disk": "Ilse"}
    (fault,) = answered(texts, {"ram": {"ram": 1984}, "disk": {"disk": 1984}}).faults()
    assert "Ilse" in fault


def test_a_run_is_bad_when_the_restart_was_answered_from_ram() -> None:
    (fault,) = answered(dict.fromkeys(PASSES, "Marta"), {"ram": {"ram": 1984}, "disk": {"ram": 1984}}).faults()
    assert "no tokens from disk" in fault


def test_a_run_is_bad_when_it_ended_early() -> None:
    assert answered({"cold": "Marta"}, {}).faults()


def test_a_model_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKV_DEMO_CACHE", str(tmp_path))

    def half(folder: Path, dtype: str) -> None:
        (folder / "config.json").write_text("{")
        raise OSError(28, f"no space left for {dtype}")

    monkeypatch.setattr(models, "_write_tiny", half)
    with pytest.raises(OSError, match="no space"):
        models.tiny_model()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(models.ModelError, match=r"config\.json"):
        models.model_folder(str(tmp_path))


def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    server = Server("no/such/model", [], log=tmp_path / "log")
    server._command = [sys.executable, "-c", "raise SystemExit('there is no such model')"]
    with pytest.raises(ServerError, match="there is no such model"), server:
        server.wait_until_ready(60)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_demo_shows_what_it_should(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmkv_vllm.demo", "--model", "tiny"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All answers identical" in done.stdout
    assert list(tmp_path.glob("lmkv-demo-*")) == []


def pd_run(texts: dict[str, str], cached: int) -> prefill_decode.Run:
    run = prefill_decode.Run.__new__(prefill_decode.Run)
    run.rows = [passes.Row("Lighthouse log", "Who?", 3)]
    run.rows[0].answers = {name: Answer(text, 0.1, 2000, cached) for name, text in texts.items()}
    run.transports, run.outcomes = {"tcp": 1.0}, {"carried": 2.0}
    return run


@pytest.mark.parametrize(
    ("texts", "cached", "status"),
    [
        (dict.fromkeys(prefill_decode.PASSES, "Marta"), 1984, 0),
        ({"plain": "Marta", "pd": "Ilse", "again": "Marta"}, 1984, 1),
        ({"plain": "Marta"}, 1984, 1),
        (dict.fromkeys(prefill_decode.PASSES, "Marta"), 0, 1),
    ],
    ids=["good", "another answer", "ended early", "computed where it was decoded"],
)
def test_a_run_over_two_servers(texts: dict[str, str], cached: int, status: int) -> None:
    assert pd_run(texts, cached).report(Console(quiet=True)) == status


@pytest.mark.slow
@pytest.mark.vllm
def test_the_demo_of_two_servers_shows_what_it_should(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmkv_vllm.demo.prefill_decode", "--model", "tiny", "--transport", "tcp"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transport: tcp" in done.stdout
    assert list(tmp_path.glob("lmkv-demo-*")) == []


def sharing_run(texts: dict[str, str], given: int, cached: int) -> sharing.Run:
    run = sharing.Run.__new__(sharing.Run)
    run.rows = [passes.Row("Lighthouse log", "Who?", 3)]
    run.rows[0].answers = {name: Answer(text, 0.1, 2000, cached) for name, text in texts.items()}
    run.given, run.transports = {"Who?": given}, {"tcp": 1.0}
    return run


@pytest.mark.parametrize(
    ("texts", "given", "cached", "status"),
    [
        (dict.fromkeys(sharing.PASSES, "Marta"), 1984, 1984, 0),
        ({"cold": "Marta", "peer": "Ilse", "ram": "Marta"}, 1984, 1984, 1),
        ({"cold": "Marta"}, 1984, 1984, 1),
        (dict.fromkeys(sharing.PASSES, "Marta"), 0, 1984, 1),
        (dict.fromkeys(sharing.PASSES, "Marta"), 1984, 0, 1),
    ],
    ids=["good", "another answer", "ended early", "computed on both", "not kept"],
)
def test_a_run_over_two_nodes(texts: dict[str, str], given: int, cached: int, status: int) -> None:
    assert sharing_run(texts, given, cached).report(Console(quiet=True)) == status


@pytest.mark.slow
@pytest.mark.vllm
def test_the_demo_of_two_nodes_shows_what_it_should(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmkv_vllm.demo.sharing", "--model", "tiny", "--transport", "tcp"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transport: tcp" in done.stdout
    assert list(tmp_path.glob("lmkv-demo-*")) == []
