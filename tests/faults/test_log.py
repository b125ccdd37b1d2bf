"""What an operator reads in the server's log: a start, an engine's end, refusals, a failed step."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from oracle import Oracle, make_engine, mixed_work, run
from paged_client import Client, Unavailable
from servers import kill_engine, serve_demo_with_log, wait_for, wait_loaded

from paged_backend.serving.requests import refusal_log
from paged_backend.serving.requests.refusal_log import RefusalLog
from paged_backend.values import log

START = (
    r"I the engine runs demo: float32 with \d+ MiB of weights on cpu with CpuAttention, 7 KV "
    r"blocks in float32 for 112 tokens; loaded in \d+\.\d s: kernels \d+\.\d s, weights \d+\.\d s, "
    r"KV pool and graphs \d+\.\d s"
)
END = "E the engine ended: killed by SIGKILL"
REFUSED = "W refused calls: queue_full 1"
LINE = re.compile(r'(.).*"\[paged\] (.*)"')


def lines_of(log: Path) -> list[str]:
    """Our lines in the server's log, each with the letter of its level."""
    found = map(LINE.fullmatch, log.read_text().splitlines())
    return [f"{match[1]} {match[2]}" for match in found if match is not None]


@pytest.mark.server
def test_the_log_has_a_start_an_end_of_the_engine_and_a_refusal(tmp_path: Path) -> None:
    blocks = 8 * 16 * bytes_of_a_token()
    options = {"max_model_len": 100, "kv_cache_memory_bytes": blocks, "max_waiting_requests": 1}
    with (
        serve_demo_with_log(tmp_path, max_num_seqs=1, **options) as (server, log),
        Client(server.grpc_url, timeout=60) as client,
    ):
        client.generate("What does", max_tokens=4)
        assert_lines(log, [START])
        kill_engine(server)
        wait_loaded(server, 1)
        assert_lines(log, [START, END, START])
        endless = {"max_tokens": 90, "ignore_eos": True}
        with client.stream("a", **endless) as first, client.stream("b", **endless):
            next(iter(first))
            with pytest.raises(Unavailable, match="queue_full"):
                client.generate("c", max_tokens=4)
            assert_lines(log, [START, END, START, REFUSED])
    assert_lines(log, [START, END, START, REFUSED, "I Shutdown complete"])


def bytes_of_a_token() -> int:
    from paged_backend.checkpoint.bundled import MODEL_DIR
    from paged_backend.checkpoint.model_config import load_model_config

    config = load_model_config(MODEL_DIR)
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4


def assert_lines(log: Path, patterns: list[str]) -> None:
    wait_for(lambda: len(lines_of(log)) >= len(patterns), 10, "a line is missing")
    lines = lines_of(log)
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_refusals_are_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    log, refused = RefusalLog(), Counter[str]()
    with caplog.at_level(logging.INFO, "paged_backend"):
        log.write(refused, 0.0)
        refused["queue_full"] += 2
        log.write(refused, 1.0)
        refused += Counter(queue_full=5, rate_limited=1)
        log.write(refused, 2.0)
        log.write(refused, 1.0 + refusal_log.INTERVAL_S)
        log.write(refused, 99.0)
    assert [record.getMessage() for record in caplog.records] == [
        "refused calls: queue_full 2",
        "refused calls: queue_full 5, rate_limited 1",
    ]


def test_a_failed_step_is_described_without_its_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Oracle("llama2", tmp_path)
    engine = make_engine(tmp_path)

    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.executor.model_runner._model, "forward", fail)
    with caplog.at_level(logging.INFO, "paged_backend"), pytest.raises(MemoryError):
        run(engine, [([190, 191, 192], 4)])
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == (
        "a step failed with MemoryError; it was: 3 tokens; sequence 0: 3 tokens from position 0, "
        "1 samples, blocks from 0 on [1]; block copies [], freed sequences []"
    )


def test_nothing_is_logged_for_tokens_and_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Oracle("llama2", tmp_path)
    engine = make_engine(tmp_path)
    with caplog.at_level(logging.INFO, "paged_backend"):
        run(engine, mixed_work(8))
    assert caplog.records == []


class Lines(logging.Handler):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_no_kind_of_line_fills_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "INTERVAL_S", 0.2)
    monkeypatch.setattr(log, "_LIMIT", log.LineLimit())
    handlers, level = log.LOG.handlers, log.LOG.level
    lines = Lines()
    try:
        log.log_to(lines, "info")
        for number in range(1000):
            log.LOG.info("Cancelling the request %d", number)
        log.LOG.info("another kind")
        for _ in range(1000):
            log.write_internal_error(ValueError("secret"))
        assert len(lines.texts) == log.MAX_LINES + 1
        time.sleep(0.25)
        log.LOG.info("Cancelling the request %d", 1000)
        log.write_internal_error(ValueError("secret"))
    finally:
        log.LOG.handlers = handlers
        log.LOG.setLevel(level)
    assert lines.texts[-1] == "Cancelling the request 1000 (980 such lines were left out)"
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == log.MAX_LINES + 1
    assert errors[-1].endswith("(980 such lines were left out)")
    assert "secret" not in "".join(errors)
