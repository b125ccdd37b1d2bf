"""Anthropic's Messages API.

`route` answers, `prompt` turns a body into a chat, and `format` and `items` write the answer.
"""
