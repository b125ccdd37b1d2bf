"""The flags of the gateway that ``paged-backend serve`` has, too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paged_backend.values.errors import ConfigError

T = TypeVar("T")

_FLAGS = (
    *("api_key_file", "openai_restricted_api", "share_prefix_cache", "max_body_bytes"),
    *("max_stream_backlog", "max_connections", "max_connections_per_address"),
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    *("runtime_lora_keys", "request_timeout", "trust_routing_headers", "objective_priorities"),
)


def add_gateway_options(group: argparse._ActionsContainer) -> None:
    """Add the flags."""
    # The second name of an option is from Triton's OpenAI frontend.
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="KEY or TENANT KEY on each line; default: those in PAGED_API_KEYS, with commas "
        "between them. Without any, everybody is let in",
    )
    group.add_argument(
        "--openai-restricted-api",
        nargs=3,
        action="append",
        metavar=("APIS", "HEADER", "VALUE"),
        help="require a header of requests to these routes, one or more of inference, "
        "embedding, model-repository, metrics and health with commas between them; may be "
        "repeated. Other users of this machine can see the value in the list of processes",
    )
    group.add_argument(
        "--runtime-lora-keys",
        type=Path,
        metavar="FILE",
        help="let requests with one of the keys in this file, KEY or NAME KEY on each line, load "
        "and unload LoRA adapters (/v1/load_lora_adapter, /v1/unload_lora_adapter); the engine's "
        "option runtime_lora_folder has the adapters. Default: no request can",
    )
    group.add_argument("--request-timeout", type=float, help="seconds for a whole answer")
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="with API keys: prompts without a cache_salt share cached blocks across tenants, who "
        "then learn from cached_tokens which prompts others have sent. Default: each tenant has a "
        "salt, and no two tenants share blocks",
    )
    group.add_argument(
        "--trust-routing-headers",
        action="store_true",
        help="take the tenant, the priority, the time limit and the server of a request from the "
        "headers of a router in front of the gateway, such as llm-d's; clients must not be able to "
        "reach the gateway past it. Default: these headers are not read",
    )
    group.add_argument(
        "--objective-priorities",
        metavar="JSON",
        help="with --trust-routing-headers: the priority of each objective that the header "
        """x-gateway-inference-objective may name, such as '{"chat": -1, "batch": 5}'""",
    )
    group.add_argument(
        "--max-body-bytes",
        "--http-max-input-size",
        type=int,
        metavar="BYTES",
        help="limit on a request's body, from 1024 to 16777216 (default: 1048576)",
    )
    group.add_argument(
        "--max-stream-backlog",
        type=int,
        metavar="TOKENS",
        help="limit on a stream's tokens that wait for its reader; the stream is ended beyond it "
        "(default: 4096)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="connections open at once, from 1; beyond it idle ones are closed for new ones, and "
        "if none is idle, new ones are refused. At most the number of open files that the "
        "gateway's process may have, less 64 (default: 8192)",
    )
    group.add_argument(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="connections of one address open at once, from 1; an IPv6 network of 64 bits is one "
        "address (default: half of --max-connections, and no limit for loopback addresses)",
    )
    group.add_argument(
        "--allowed-origins",
        metavar="JSON",
        help="a list of the origins with web pages that may call the OpenAI API from a browser, "
        """such as '["https://example.org"]', or '["*"]' for all (default: none)""",
    )
    for what in ("methods", "headers"):
        group.add_argument(
            f"--allowed-{what}",
            metavar="JSON",
            help=f"""a list of the {what} that these pages may use (default: '["*"]')""",
        )
    group.add_argument(
        "--allow-credentials",
        action="store_true",
        help="let these pages send cookies and other credentials of the browser",
    )


def gateway_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags that were given, as ``GatewayOptions`` has them.

    Raises ConfigError.
    """
    from paged_client.gateway import cors, limits, read_keys, read_objectives, read_restrictions

    values: dict[str, Any] = {
        "share_prefix_cache": args.share_prefix_cache,
        "trust_routing_headers": args.trust_routing_headers,
    }
    if args.objective_priorities is not None:
        values["objective_priorities"] = _read(
            "--objective-priorities", read_objectives, args.objective_priorities
        )
    values["restrictions"] = _read(
        "--openai-restricted-api", read_restrictions, args.openai_restricted_api or ()
    )
    try:
        values["api_keys"] = read_keys(args.api_key_file)
        if args.runtime_lora_keys is not None:
            values["runtime_lora_keys"] = read_keys(args.runtime_lora_keys)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if args.request_timeout is not None:
        if not args.request_timeout > 0:
            raise ConfigError(f"--request-timeout: must be above 0, got {args.request_timeout:g}")
        values["request_timeout_s"] = args.request_timeout
    low, high = limits.MIN_BODY_BYTES, limits.MAX_BODY_BYTES
    if args.max_body_bytes is not None:
        if not low <= args.max_body_bytes <= high:
            raise ConfigError(
                f"--max-body-bytes: must be from {low} to {high}, got {args.max_body_bytes}"
            )
        values["max_body_bytes"] = args.max_body_bytes
    for name in ("max_stream_backlog", "max_connections", "max_connections_per_address"):
        number = getattr(args, name)
        if number is not None:
            if number < 1:
                raise ConfigError(f"{_flag(name)}: must be at least 1, got {number}")
            values[name] = number
    values["cors"] = cors.Cors(
        **{
            name: _read(f"--allowed-{name}", read, text)
            for name, read, text in (
                ("origins", cors.read_origins, args.allowed_origins),
                ("methods", cors.read_tokens, args.allowed_methods),
                ("headers", cors.read_tokens, args.allowed_headers),
            )
            if text is not None
        },
        with_credentials=args.allow_credentials,
    )
    return values


def gateway_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags that were given, for the command line of a gateway."""
    flags = []
    for name in _FLAGS:
        value = getattr(args, name)
        match value:
            case None | False:
                continue
            case True:
                flags.append(_flag(name))
            case list():
                for parts in value:
                    flags += [_flag(name), *parts]
            case _:
                flags.append(f"{_flag(name)}={value}")
    return flags


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read(flag: str, read: Callable[[T], Any], value: T) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
