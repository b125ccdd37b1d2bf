"""``paged-backend serve``: put a model on a real tritonserver, in the foreground."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from paged_backend.cli.gateway_options import (
    add_gateway_options,
    gateway_flags,
    gateway_values,
)
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.launch.pipeline import PipelineOptions
from paged_backend.launch.served_names import DEFAULT_NAME, ModelNames, read_names
from paged_backend.tools.demo import QUESTIONS_FOR
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model on tritonserver",
        usage="paged-backend serve [MODEL] [OPTION ...]",
        description="Serve a model on tritonserver until Ctrl-C: gRPC, HTTP and metrics, and with "
        "--openai-port the gateway in front of it.",
        epilog="The server's interfaces for shared memory, trace settings and log settings are "
        "closed to clients.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"what clients call it (default: {DEFAULT_NAME}). The first name is from Triton's "
        "model, which of `org/model` is `model`. With --openai-port, OpenAI's clients may use any "
        "of several names, and answers have the first one; with --model-repository, a name is "
        "NAME=MODEL",
    )
    group.add_argument(
        "--instances",
        type=int,
        help="front-end processes, which check requests and send responses (default: with a GPU, "
        "one for every 2 cores up to 4; otherwise 1)",
    )
    group.add_argument(
        "--pipeline",
        action="store_true",
        help="serve the models around it, too: preprocess, postprocess, llm and llm_bls, and "
        "tensorrtllm_backend's ensemble, tensorrt_llm, tensorrt_llm_bls, preprocessing and "
        "postprocessing",
    )
    group.add_argument(
        "--triton-max-batch-size",
        type=int,
        default=PipelineOptions().triton_max_batch_size,
        metavar="N",
        help="of the models with tensorrtllm_backend's names; 0: their tensors have no batch "
        "dimension, as in its LLM API (default: %(default)s)",
    )
    group.add_argument(
        "--decoupled-mode",
        choices=("true", "false"),
        default="true",
        help="of the same models; false: each request has one response, so they take /infer and "
        "no streams (default: %(default)s)",
    )
    group.add_argument("--host", default="127.0.0.1", help="address (default: loopback only)")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        group.add_argument(f"--{name}-port", type=int, default=port, help=f"default: {port}")
    group.add_argument(
        "--openai-port",
        type=int,
        metavar="PORT",
        help="speak OpenAI's HTTP API there, too, with the options of the OpenAI gateway",
    )
    group.add_argument(
        "--model-repository",
        type=Path,
        metavar="FOLDER",
        help="serve the models of this model repository in place of MODEL; their options are in it",
    )
    group.add_argument("--verbose", action="store_true", help="show the server's own log")
    group.add_argument(
        "--write-to",
        type=Path,
        metavar="FOLDER",
        help="only write the model repository there and print the tritonserver command for it",
    )
    add_gateway_options(parser.add_argument_group("OpenAI gateway, with --openai-port"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from paged_backend.launch import ports, serve, storage
    from paged_backend.launch.front_ends import choose_num_front_ends

    options = engine_options(args)
    flags = gateway_flags(args)
    if args.openai_port is not None:
        gateway_values(args)  # raises ConfigError before the model is loaded
    elif flags:
        raise ConfigError(f"{flags[0].partition('=')[0]}: needs --openai-port")
    names = _names(args)
    if args.model_repository is not None:
        _check_alone(args, options)
    instances = args.instances
    if instances is None:
        instances = choose_num_front_ends(args.device)
    if args.write_to is not None:
        with storage.writing(args.write_to):
            args.write_to.mkdir(parents=True, exist_ok=True)
        endpoints = ports.Endpoints(args.host, args.http_port, args.grpc_port, args.metrics_port)
        command = serve.command_by_hand(
            args.write_to.resolve(),
            options,
            name=names.triton,
            instances=instances,
            pipeline=_pipeline(args),
            endpoints=endpoints,
        )
        print(command)
        return 0
    serve.serve(
        options,
        name=names.triton,
        instances=instances,
        pipeline=_pipeline(args),
        repository=args.model_repository,
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        openai_port=args.openai_port,
        verbose=args.verbose,
        note=None if args.model_repository else _what_to_ask(str(options["model"])),
        gateway_flags=[*flags, *names.gateway_flags],
    )
    return 0


def _names(args: argparse.Namespace) -> ModelNames:
    """Return the names of the model, or of the models of a repository."""
    names, has_gateway = args.served_model_name, args.openai_port is not None
    if args.model_repository is None:
        return read_names(names, has_gateway=has_gateway and args.write_to is None)
    if names and not has_gateway:
        raise ConfigError("--served-model-name: needs --openai-port with --model-repository")
    return ModelNames("", ("--served-model-name", *names) if names else ())


def _check_alone(args: argparse.Namespace, options: Mapping[str, object]) -> None:
    """Refuse a model and its options together with a model repository, which has them."""
    changed = {
        **{name: name != "model" for name in options},
        "MODEL": options["model"] != EngineConfig.model,
        "instances": args.instances is not None,
        "pipeline": args.pipeline,
        "write_to": args.write_to is not None,
    }
    for name in (name for name, is_changed in changed.items() if is_changed):
        flag = name if name == "MODEL" else f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag}: cannot be used with --model-repository")


def _what_to_ask(model: str) -> str | None:
    if model not in QUESTIONS_FOR:
        return None
    return f"the small model {model} knows little: {QUESTIONS_FOR[model]}"


def _pipeline(args: argparse.Namespace) -> PipelineOptions | None:
    options = PipelineOptions(args.triton_max_batch_size, args.decoupled_mode == "true")
    if args.pipeline:
        return options
    if options != PipelineOptions():
        raise ConfigError("--triton-max-batch-size and --decoupled-mode need --pipeline")
    return None
