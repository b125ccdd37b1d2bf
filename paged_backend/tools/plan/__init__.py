"""Computes from a checkpoint's headers what memory and time a model will need.

It loads no weights. Begin with `planner`.
"""
