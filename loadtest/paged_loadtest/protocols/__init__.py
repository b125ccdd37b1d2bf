"""How requests and answers look on each wire; no I/O, for asyncio and Locust alike.

Each module has ``encode``, which makes what is sent of a :class:`Request`, and a ``Decoder``, which
fills a :class:`Timeline` with what arrives. All decoding is greedy. Requests of different
``cache_salt`` share nothing in a prefix cache of ours or vLLM's; peers may not know it.
"""
