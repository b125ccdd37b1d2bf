"""vLLM's routes for routers: prompts become token ids, and token ids become answers.

`render.py` has the routes that tokenize (`/v1/.../render`), and `route.py` the routes below
`/inference/v1`, which generate and abort.
"""
