"""Subcommands of ``paged-backend bench`` that need the load tester.

Each module is one kind of bench; `options` holds what they share. Begin with `serve`.
"""
