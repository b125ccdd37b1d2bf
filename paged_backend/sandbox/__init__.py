"""Work on untrusted input in processes with limits of time and memory.

`client` asks, `server` answers, and `process` is one run. Templates, grammars and tokenizers use
it.
"""
