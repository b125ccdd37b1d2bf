"""Turns constraints on outputs, forced tool calls among them, into grammars, and those into masks.

A constraint is compiled twice: in a process with limits, because it is a stranger's program
(`client`, `compile_process`), and then in the engine (`compiler`, `matcher`), where the completions
of a request share a lexer.
"""
