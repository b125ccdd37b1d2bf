"""transformers 4: reads the bundled model's tokenizer and renders its chats as the server does."""

# /// script
# dependencies = ["transformers>=4.50,<5", "jinja2", "requests"]
# ///

import os

import requests
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])
messages = [{"role": "user", "content": os.environ["QUESTION"]}]
own = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
asked = {"model": os.environ["MODEL"], "messages": messages}
servers = requests.post(f"{url}/tokenize", json=asked, timeout=60).json()["tokens"]
assert own == servers, (own, servers)
assert tokenizer.convert_tokens_to_ids(tokenizer.all_special_tokens) == [1, 0, 2]
print(f"{len(own)} token ids of a chat")
