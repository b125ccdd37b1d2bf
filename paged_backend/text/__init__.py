"""Tokenizers, chat templates, stop strings, and text from tokens.

`transformers` says once, in a sandbox, what the files of a folder mean (`resolution`). Begin with
`tokenizer`, `chat` and `text_stream`.
"""
