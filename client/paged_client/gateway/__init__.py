"""OpenAI's HTTP API for paged_llm models on any number of servers; has no tokenizer or tensors.

Requires the extra ``paged-backend[gateway]``.
"""

from paged_client.gateway.app import create_app
from paged_client.gateway.auth import KEYS_VARIABLE, ApiKey, read_keys
from paged_client.gateway.options import GatewayOptions
from paged_client.gateway.restrictions import read_restrictions
from paged_client.gateway.routing_headers import read_objectives
from paged_client.gateway.served_names import read_served_names
from paged_client.gateway.server import serve

__all__ = [
    "KEYS_VARIABLE",
    "ApiKey",
    "GatewayOptions",
    "create_app",
    "read_keys",
    "read_objectives",
    "read_restrictions",
    "read_served_names",
    "serve",
]
