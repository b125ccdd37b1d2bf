"""OpenAI's Responses API, without stored responses.

`route` answers, `prompt` turns a body into a chat, and `format` and `items` write the answer.
"""
