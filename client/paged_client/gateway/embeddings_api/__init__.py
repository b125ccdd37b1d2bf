"""OpenAI's embeddings, and the scores and rankings that vLLM makes from embeddings."""
