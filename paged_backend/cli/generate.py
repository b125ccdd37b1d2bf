"""``paged-backend generate``: stream an answer from a running server to the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import TYPE_CHECKING, Any

from paged_backend.cli.options import Subparsers
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.validation import Rule

if TYPE_CHECKING:
    from paged_client import Stream

FLAGS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "generate", help="stream an answer from a running server", description=__doc__
    )
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument(
        "--chat", action="store_true", help="as a user's message, by the model's chat template"
    )
    parser.add_argument("--url", default="127.0.0.1:8001", help="the server's gRPC address")
    parser.add_argument("--model", default="paged_llm", help="served model name")
    parser.add_argument("--timeout", type=float, help="seconds for the whole answer")
    for spec in fields(SamplingParams):
        if spec.name in FLAGS:
            rule: Rule = spec.metadata["rule"]
            flag = "--" + spec.name.replace("_", "-")
            parser.add_argument(flag, type=rule.kind, help=spec.metadata["help"])
    parser.add_argument("--stop", action="append", help="end before this text; may be repeated")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer as it arrives; Ctrl-C cancels the request on the server."""
    # Imported here, so that other commands run where tritonclient is not installed.
    from paged_client import Client, ClientError

    params: dict[str, Any] = {"max_tokens": 256}
    for name in (*FLAGS, "stop"):
        if getattr(args, name) is not None:
            params[name] = getattr(args, name)
    prompt = [{"role": "user", "content": args.prompt}] if args.chat else args.prompt
    interrupted = threading.Event()
    try:
        with (
            Client(args.url, args.model) as client,
            client.stream(prompt, timeout=args.timeout, **params) as stream,
            _ctrl_c_cancels(stream, interrupted),
        ):
            for chunk in stream:
                print(chunk.text, end="", flush=True)
    except ClientError as error:
        if interrupted.is_set():
            return 130
        print(f"paged-backend: error: {error}", file=sys.stderr)
        return 1
    finally:
        print(flush=True)
    return 0


@contextmanager
def _ctrl_c_cancels(stream: Stream, interrupted: threading.Event) -> Iterator[None]:
    """Let the first Ctrl-C cancel a stream and set an event instead of raising KeyboardInterrupt.

    Raised in the middle of grpc's code, it can leave a call that no deadline ends any more.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        interrupted.set()
        stream.cancel()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
