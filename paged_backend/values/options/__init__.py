"""The engine's options, by concern; ``EngineConfig`` in `config` has all of them.

Each option is declared once, with its type, range and description. Begin with `model`.
"""
