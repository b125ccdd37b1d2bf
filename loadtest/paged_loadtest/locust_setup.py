"""Turns Locust's command line into checked connections and requests to send."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gevent
from locust import User
from locust.argument_parser import LocustArgumentParser

from paged_backend.tools.workloads import TokenizerContext, WorkloadOptions, make_requests
from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_backend.values.flags import add_flags, flag_values
from paged_loadtest.destination import Unreachable
from paged_loadtest.locust_options import NUM_PROMPTS, STOP_TIMEOUT_S, LocustOptions
from paged_loadtest.locust_users import StreamingUser
from paged_loadtest.locust_wires import Transport

_LEAST_VOCABULARY = 256  # every model has these ids; used if no server reports its size
_LOG = logging.getLogger(__name__)


def add_arguments(parser: LocustArgumentParser, **_: Any) -> None:
    """Add our flags in groups, which Locust's web page hides, so that they cannot change there."""
    parser.set_defaults(stop_timeout=STOP_TIMEOUT_S)
    add_flags(parser.add_argument_group("Traffic"), LocustOptions)
    group = parser.add_argument_group("Workload")
    add_flags(group, WorkloadOptions, leave_out=("num_prompts",))
    group.add_argument(
        "--num-prompts",
        type=int,
        help="different requests to make, which are gone through again and again (default: "
        f"{NUM_PROMPTS}, and all of a trace, once)",
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """Options, requests and transports of the users."""

    options: LocustOptions
    requests: Sequence[WorkloadRequest]
    wires: Mapping[type[Transport], Transport]

    def close(self) -> None:
        """Close the connections."""
        for wire in self.wires.values():
            wire.close()


def tagged(user_classes: Iterable[type[User]], common: Any) -> list[type[User]]:
    """Return the user classes that --tags and --exclude-tags select.

    Raises:
        ConfigError: no class is selected.
    """
    wanted, unwanted = set(common.tags or ()), set(common.exclude_tags or ())
    users = {user: _tags(user) for user in user_classes}
    chosen = [user for user, tags in users.items() if not wanted or tags & wanted]
    chosen = [user for user in chosen if not users[user] & unwanted]
    if not chosen:
        known = ", ".join(sorted(set().union(*users.values())))
        raise ConfigError(f"--tags and --exclude-tags leave no users; the tags are {known}")
    return chosen


def _tags(user: type[User]) -> set[str]:
    return {name for ask in user.tasks for name in getattr(ask, "locust_tag_set", ())}


def reachable(user_classes: Sequence[type[User]], common: Any) -> list[type[User]]:
    """Drop the user classes without a reachable server, with a warning.

    Users chosen explicitly, by a class, tag or address on the command line, are always kept.

    Raises:
        ConfigError: an option cannot be used, or no user class has a reachable server.
    """
    options = LocustOptions(**flag_values(common, LocustOptions))
    silent: dict[type[User], Unreachable] = {}
    for user in user_classes:
        if common.user_classes or common.tags or not issubclass(user, StreamingUser):
            continue
        wire = user.wire_type(options)
        try:
            if wire.has_default_address:
                wire.check()
        except Unreachable as error:
            silent[user] = error
        finally:
            wire.close()
    if len(silent) == len(user_classes):
        raise next(iter(silent.values()))
    for user, reason in silent.items():
        _LOG.warning("%s is left out: %s", user.__name__, reason)
    return [user for user in user_classes if user not in silent]


def prepare(user_classes: Iterable[type[User]], common: Any) -> Setup:
    """Check that the servers of these users answer, and build the requests.

    Raises:
        ConfigError: an option, a server or a file cannot be used.
    """
    options = LocustOptions(**flag_values(common, LocustOptions))
    workload = WorkloadOptions(**flag_values(common, WorkloadOptions))
    if workload.num_prompts is None and workload.dataset_name != "trace":
        workload = replace(workload, num_prompts=NUM_PROMPTS)
    wires: dict[type[Transport], Transport] = {}
    try:
        for user in user_classes:
            if issubclass(user, StreamingUser):
                wires[user.wire_type] = user.wire_type(options)
        material = _material(wires.values(), options)
        return Setup(options, _make_requests(workload, material), wires)
    except BaseException:
        for wire in wires.values():
            wire.close()
        raise


def _make_requests(workload: WorkloadOptions, material: TokenizerContext) -> list[WorkloadRequest]:
    """Build in a thread: loading a tokenizer takes seconds, and a silent worker counts as dead."""

    def make() -> list[WorkloadRequest] | ConfigError:
        try:
            return make_requests(workload, material)
        except ConfigError as error:
            return error  # the thread pool would print a raised exception

    made: list[WorkloadRequest] | ConfigError = gevent.get_hub().threadpool.apply(make)
    if isinstance(made, ConfigError):
        raise made
    return made


def _material(wires: Iterable[Transport], options: LocustOptions) -> TokenizerContext:
    facts = [wire.check() for wire in wires]
    vocab_sizes = [fact.vocab_size for fact in facts if fact.vocab_size is not None]
    limits = [fact.max_model_len for fact in facts if fact.max_model_len is not None]
    return TokenizerContext(
        options.vocab_size or min(vocab_sizes, default=_LEAST_VOCABULARY),
        options.max_model_len or min(limits, default=sys.maxsize),
        options.tokenizer,
    )
