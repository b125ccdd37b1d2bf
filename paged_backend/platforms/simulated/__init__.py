"""A device that takes time but computes nothing, to measure the engine's own work.

Only `paged-backend bench host` can choose it.
"""
