"""Loads a model: connects an instance to its engine, and starts its front end."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import triton_python_backend_utils as pb_utils

from paged_backend.grammar.client import GrammarChecker
from paged_backend.process.adapter_names import AdapterNames
from paged_backend.process.engines import Engines
from paged_backend.serving.deployment import Deployment, exit_timeout_s
from paged_backend.serving.metrics.engine_metrics import VLLM_PREFIX
from paged_backend.serving.metrics.publisher import MetricsPublisher
from paged_backend.serving.metrics.stat_logger import StatLogger
from paged_backend.serving.metrics.vllm_metrics import VllmMetrics
from paged_backend.serving.requests.drain import Drain, drain_limit_s
from paged_backend.serving.requests.front_end import FrontEnd
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.tool_use import load_tool_use
from paged_backend.serving.triton import TritonLogHandler
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.engine_args import EngineArgs, read_engine_args
from paged_backend.values.log import LOG, log_to
from paged_backend.values.options.lifetime import LifetimeOptions
from paged_backend.values.request import RequestLimits

VISIBLE = "CUDA_VISIBLE_DEVICES"


class LoadedModel(NamedTuple):
    """A front end that has begun to work, and what it checks requests against."""

    front_end: FrontEnd
    tokenizer: Tokenizer
    limits: RequestLimits
    config: EngineConfig


def load(deployment: Deployment) -> LoadedModel:
    """Connect to the engine, start it if no other instance has, and start the front end.

    Raises:
        ConfigError: the options or the checkpoint cannot be used.
    """
    args = read_engine_args(deployment.folder / "model.json")
    log_to(TritonLogHandler(deployment.backend), args.config.log_level)
    if args.without_effect:
        LOG.info(f"model.json: without effect here: {', '.join(args.without_effect)}")
    args = replace(args, config=deployment.groups.engines(args.config))
    visible = deployment.groups.visible_gpus(os.environ.get(VISIBLE))
    if visible is not None:
        os.environ[VISIBLE] = visible  # the engines' processes inherit it
    link = Engines(args.config, deployment.name, deployment.version, os.getppid())
    ready = link.connect()
    tokenizer = load_tokenizer(ready.tokenizer, args.config)
    grammars = GrammarChecker(ready.tokenizer, ready.limits.vocab_size)
    tool_use = load_tool_use(ready.tokenizer, tokenizer, args.config)
    names = AdapterNames(link.folder, args.config.lora_modules)
    front_end = FrontEnd(
        link,
        RequestParser(tokenizer, ready.limits, grammars, tool_use, ready.sampling_defaults, names),
        tokenizer,
        _stat_logger(deployment, args, ready.limits),
        args.config,
        _drain(deployment, args.config),
        names,
    )
    front_end.start()
    return LoadedModel(front_end, tokenizer, ready.limits, args.config)


def _drain(deployment: Deployment, config: LifetimeOptions) -> Drain:
    server_pid = os.getppid()
    limit_s = drain_limit_s(
        config.drain_timeout_s, exit_timeout_s(server_pid), deployment.groups.num_instances
    )
    return Drain(server_pid, limit_s, lambda n: LOG.info(f"Awaiting remaining {n} requests"))


def _stat_logger(deployment: Deployment, args: EngineArgs, limits: RequestLimits) -> StatLogger:
    """Return the metrics to report; they do nothing if the server has metrics turned off."""
    prefix = args.config.metrics_prefix
    # Under vLLM's prefix there are vllm_backend's names already.
    both = deployment.report_vllm_metrics and args.log_stats and prefix != VLLM_PREFIX
    kind = VllmMetrics if both else MetricsPublisher
    try:
        num_engines = args.config.data_parallel_size
        return kind(pb_utils.MetricFamily, deployment.labels, prefix, limits, num_engines)
    except pb_utils.TritonModelException as error:
        if "metrics not supported" not in str(error).lower():
            raise
        return StatLogger()
