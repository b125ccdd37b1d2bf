"""A model whose chat template takes tools: the demo's weights with another template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from paged_backend.checkpoint.bundled import MODEL_DIR

# In the shape of the Hermes and Qwen families, on the demo's own roles.
TEMPLATE = """\
{%- if tools -%}
<|system|><tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Call a function with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|end|>
{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the documentation of a name.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 20},
                "lines": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["name", "lines"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: list[dict[str, Any]] = [LOOKUP, NOW]
MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]


def write_tool_model(folder: Path) -> Path:
    """Write the model to a new folder, and return the folder."""
    shutil.copytree(MODEL_DIR, folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
