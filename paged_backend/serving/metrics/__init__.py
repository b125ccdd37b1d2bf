"""Publishes the engine's counters as Triton metrics, under vLLM's and TensorRT-LLM's names.

Begin with `publisher`; `engine_metrics` has the series of each engine, `vllm_metrics` the names of
vllm_backend, and `stat_logger` the interface.
"""
