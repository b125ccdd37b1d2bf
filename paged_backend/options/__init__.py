"""The engine's options, by concern; :class:`paged_backend.config.EngineConfig` has all of them.

Each option is declared once, with its type, range and description. Begin with `model`.
"""
