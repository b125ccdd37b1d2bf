"""Encoding and decoding for each protocol, without I/O, shared by asyncio and Locust clients.

Each module has ``encode``, which turns a `WorkloadRequest` into a message, and a decoder, which
fills a :class:`Timeline` from the response. All sampling is greedy. Requests with different
``cache_salt`` share nothing in the prefix cache of our server or vLLM; others may ignore it.
"""
