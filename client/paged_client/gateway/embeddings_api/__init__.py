"""OpenAI's embeddings, and the scores and rankings that vLLM makes from embeddings.

`schema` has the bodies, and `route` answers them.
"""
