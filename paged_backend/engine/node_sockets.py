"""The sockets between node 0 and the other nodes: encrypted, and closed to who lacks the secret.

ZeroMQ's CURVE encrypts all messages. Both key pairs are made from the nodes' secret. The public key
of node 0 is never sent, and without it a connection ends at its first message, in ZeroMQ's thread.
"""

from __future__ import annotations

import hashlib
import socket
import time

import zmq
from zmq.utils import z85

from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.log import LOG
from paged_backend.values.nodes import Nodes

_HANDSHAKE_MS = 5000  # how long a connection may take to show that it has the secret
_HEARTBEAT_MS = 1000
_SILENCE_MS = 10_000  # after which the host at the other end counts as lost
_RECONNECT_MS = (100, 2000)
_RETRY_S = 1.0  # between two attempts to find the address of a name

Context = zmq.Context[zmq.Socket[bytes]]


def resolve(nodes: Nodes, timeout_s: float) -> str:
    """Return the address of node 0 as a number; a name of a new pod takes a while to be known.

    Raises:
        ConfigError: the name is not known for the whole time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return str(socket.getaddrinfo(nodes.address, nodes.port)[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise option_error(
                    "master_addr", f"cannot be found: {nodes.address} ({error.strerror})"
                ) from error
            LOG.warning("%s is not known yet (%s)", nodes.address, error.strerror)
            time.sleep(_RETRY_S)


def own_address(nodes: Nodes) -> str:
    """Return the address of this host in the network of node 0, as a number.

    Raises:
        ConfigError: there is no way to node 0.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            nodes.address, nodes.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no way to {nodes.address} (master_addr): {error.strerror}") from error


def listen(context: Context, nodes: Nodes, address: str, key: bytes) -> zmq.Socket[bytes]:
    """Return the socket of node 0.

    Raises:
        ConfigError: the address is not one of this host, or the port is in use.
    """
    secret, public = _key_pair(key, b"node 0")
    router = _socket(context, zmq.ROUTER, secret, public)
    router.curve_server = True
    router.router_mandatory = True  # a message to a node that is gone is an error
    try:
        router.bind(_endpoint(address, nodes.port))
    except zmq.ZMQError as error:
        router.close()
        raise ConfigError(
            f"cannot listen at {address}, port {nodes.port} (master_addr, master_port): "
            f"{error.strerror}"
        ) from error
    return router


def connect(context: Context, nodes: Nodes, key: bytes) -> zmq.Socket[bytes]:
    """Return the socket of another node, which tries to reach node 0 until it is closed."""
    secret, public = _key_pair(key, b"other")
    dealer = _socket(context, zmq.DEALER, secret, public)
    dealer.curve_serverkey = _key_pair(key, b"node 0")[1]
    dealer.reconnect_ivl, dealer.reconnect_ivl_max = _RECONNECT_MS
    dealer.connect(_endpoint(nodes.address, nodes.port))
    return dealer


def _socket(context: Context, kind: int, secret: bytes, public: bytes) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.set_hwm(0)
    made.linger = 0
    made.ipv6 = True
    made.handshake_ivl = _HANDSHAKE_MS
    made.heartbeat_ivl, made.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
    made.curve_secretkey, made.curve_publickey = secret, public
    return made


def _key_pair(key: bytes, owner: bytes) -> tuple[bytes, bytes]:
    """Return the secret and the public key of an owner, in ZeroMQ's text form."""
    if not zmq.has("curve"):
        raise ConfigError("several nodes need a pyzmq with CURVE, as on PyPI; this one lacks it")
    secret = z85.encode(hashlib.blake2b(key, digest_size=32, person=owner).digest())
    return secret, zmq.curve_public(secret)


def _endpoint(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
