"""Decides which tokens of which sequences each step computes, and which KV blocks hold them.

It imports values only, and knows neither tensors nor devices. Begin with `scheduler`, then
`sequence` and `kv_cache_manager`.
"""
