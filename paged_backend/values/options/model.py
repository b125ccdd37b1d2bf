"""The model: what is loaded, and in which number format."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.errors import option_error
from paged_backend.values.pooling_params import PoolingType
from paged_backend.values.validation import Rule, checked

AUTO, GENERATE, EMBED, SCORE, POOLING = "auto", "generate", "embed", "score", "pooling"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    model: str = checked(
        "demo",
        Rule(str),
        "folder, GGUF file or Hugging Face id of the checkpoint; demo and demo-tools are bundled "
        "models",
    )
    tokenizer: str | None = checked(
        None,
        Rule(str, optional=True),
        "folder, GGUF file or id of the tokenizer; default: the model's",
    )
    revision: str | None = checked(
        None,
        Rule(str, max_length=255, optional=True),
        "branch, tag or commit hash of a model of the Hugging Face Hub; default: its main branch",
    )
    tokenizer_revision: str | None = checked(
        None,
        Rule(str, max_length=255, optional=True),
        "the same for the tokenizer; default: revision if the tokenizer is the model's, otherwise "
        "the main branch",
    )
    download_dir: str | None = checked(
        None,
        Rule(str, optional=True),
        "cache folder for files of the Hugging Face Hub; default: HF_HUB_CACHE, or hub in HF_HOME",
    )
    task: str = checked(
        AUTO,
        Rule(str, choices=(AUTO, GENERATE, EMBED, SCORE, POOLING)),
        "embed makes embeddings, score scores pairs of texts with a reranker, pooling is whichever "
        "of the two the checkpoint supports; auto: score for rerankers, embed for checkpoints that "
        "say how they are pooled (by a modules.json, or pooling_type in a GGUF file) or have no "
        "output layer, otherwise generate",
    )
    pooling_type: str | None = checked(
        None,
        Rule(str, choices=tuple(PoolingType), optional=True),
        "the hidden states that become an embedding: of the last token, the mean over all tokens, "
        "or of the first token (cls); default: as the checkpoint says, or last (cls for "
        "encoders)",
    )
    normalize: bool | None = checked(
        None,
        Rule(bool, optional=True),
        "scale embeddings to a length of 1; default: as the checkpoint says, or true",
    )
    classifier_from_token: str | None = checked(
        None,
        Rule(str, max_length=256, optional=True),
        "makes a reranker of a model that generates: two tokens, such as no,yes; a score is the "
        "probability of the second one, compared with the first one",
    )
    device: str = checked(
        "auto", Rule(str, choices=("auto", "cpu", "cuda")), "auto uses a GPU if there is one"
    )
    dtype: str = checked(
        "auto",
        Rule(str, choices=DTYPES),
        "auto: float32 on a CPU, the checkpoint's on a GPU; on a CPU, bfloat16 halves the memory "
        "of weights, keys and values, and is faster for few sequences, with AMX for all",
    )
    model_impl: str = checked(
        "auto",
        Rule(str, choices=("auto", "paged", "vllm", "transformers")),
        "what computes the model: paged (vllm means the same) is our implementation of its family, "
        "transformers is its code with our attention; auto prefers paged",
    )
    load_format: str = checked(
        "auto", Rule(str, choices=("auto", "dummy")), "dummy makes random weights"
    )
    quantization: str | None = checked(
        None,
        Rule(str, max_length=64, optional=True),
        "int8, int4 or fp8 rounds the weights of linear layers as they are loaded; for a quantized "
        "checkpoint its quant_method, or gguf; default: as the checkpoint says",
    )
    seed: int = checked(
        0, Rule(int, 0, 2**63 - 1), "seed of requests without one, and of dummy weights"
    )
    max_model_len: int | None = checked(
        None,
        Rule(int, 2, 2**24, optional=True),
        "maximum number of tokens of prompt and output; default: the model's",
    )

    def check_revisions(self) -> None:
        """Refuse empty names.

        Raises:
            ConfigError: a revision is empty.
        """
        for name in ("revision", "tokenizer_revision"):
            if getattr(self, name) == "":
                raise option_error(name, "must be a branch, a tag, a commit hash or null, got ''")
