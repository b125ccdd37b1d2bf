"""Reads answers as they arrive, and separates content, reasoning and tool calls.

It imports values only; all readers take time linear in an answer. Begin with `response`; `formats`
lists the formats.
"""
