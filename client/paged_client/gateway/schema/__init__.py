"""Request bodies of OpenAI's chat completions and completions, and of vLLM's tokenizer routes.

Every other API has a schema of its own in its folder; all of them build on `body` and `generation`.
"""
