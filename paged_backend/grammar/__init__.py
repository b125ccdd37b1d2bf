"""Turns constraints on outputs into grammars, and grammars into masks of tokens.

A constraint is compiled twice: in a process with limits, because it is a stranger's program
(`client`, `compile_process`), and then in the engine (`compiler`, `matcher`), where the completions
of a request share a lexer.
"""
