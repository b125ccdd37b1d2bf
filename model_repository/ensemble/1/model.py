"""What tritonserver loads; the model itself is in the installed package."""

from paged_backend.serving.tensorrtllm.text import TritonPythonModel

__all__ = ["TritonPythonModel"]
