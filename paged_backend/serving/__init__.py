"""The Python backend models: requests of Triton become requests of the engine, answers responses.

Nothing else imports Triton's `triton_python_backend_utils`. Begin with `model`. `requests` is the
way of a request, and `tensorrtllm` holds the models with tensorrtllm_backend's tensors.
"""
