"""The largest sizes that a checkpoint's config.json may name.

Something is made for each layer, expert or head before its weights are read, so a number that
nothing stands behind would cost memory and time. Each limit is several times what the largest known
models have.
"""

from __future__ import annotations

MAX_LAYERS = 2**10
MAX_EXPERTS = 2**12  # experts of a layer
MAX_EXPERTS_OF_MODEL = 2**17  # in all layers
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12
MAX_HIDDEN_SIZE = 2**18
MAX_INNER_SIZE = 2**22  # inner size of an MLP or an expert
MAX_VOCAB_SIZE = 2**23
MAX_POSITIONS = 2**24  # as many as the option max_model_len allows
MAX_WINDOW = 2**31 - 1
MAX_GROUP_SIZE = 2**31 - 1  # inputs or outputs of a layer that share a scale
MAX_LABELS = 2**16
MAX_END_TOKENS = 2**10
MAX_PATTERNS = 2**12  # patterns of layers in a quantization_config
