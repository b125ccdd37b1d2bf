"""Request bodies of OpenAI's chat completions and completions, and of vLLM's tokenizer routes.

Other APIs define their request bodies in their own folders, also with `body` and `generation`.
"""
