"""vLLM's routes for routers: prompts become token ids, and token ids become answers.

`render.py` has the routes that tokenize (`/v1/.../render`), and `route.py` those of
`/inference/v1`, which generate and abort.
"""
