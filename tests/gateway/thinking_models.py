"""A model with a chat template that knows tools and reasoning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from paged_backend.checkpoint.bundled import MODEL_DIR

# The model was not trained with it, so it calls a tool only where it must, and thinks nonsense.
_TEMPLATE = """
{%- if tools -%}
<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{"name"<|end|>
{%- endif -%}
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] }}
{%- for call in message.get('tool_calls') or [] -%}
<tool_call>{{ call['function'] | tojson }}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{%- if enable_thinking -%}<think>{{ '\\n' }}{%- endif -%}
{%- endif -%}
"""


def write_thinking_model(folder: Path) -> Path:
    """Copy the demo model with another chat template."""
    shutil.copytree(MODEL_DIR, folder)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        # A budget for reasoning needs a token for its end; the padding is not used.
        file.write_text(file.read_text().replace("<|pad|>", "</think>"))
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": _TEMPLATE}))
    return folder
