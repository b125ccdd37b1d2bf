"""Publishes the engine's counters as Triton metrics, under vLLM's and TensorRT-LLM's names.

Begin with `publisher`; `vllm_metrics` has vLLM's names, and `stat_logger` the lines in the log.
"""
