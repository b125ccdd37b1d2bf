"""OpenAI's HTTP API in front of paged_llm models: no tokenizer, no tensors, any number of servers.

Needs the extra ``paged-backend[gateway]``.
"""

from paged_client.gateway.app import GatewayOptions, create_app
from paged_client.gateway.auth import KEYS_VARIABLE, ApiKey, read_keys
from paged_client.gateway.server import serve

__all__ = ["KEYS_VARIABLE", "ApiKey", "GatewayOptions", "create_app", "read_keys", "serve"]
