"""What tritonserver loads; the model itself is in the installed package."""

from paged_backend.serving.tensorrtllm.steps import Preprocessing as TritonPythonModel

__all__ = ["TritonPythonModel"]
