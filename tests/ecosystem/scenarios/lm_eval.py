"""LM Evaluation Harness: log-likelihoods of given texts, and generated text."""

# /// script
# dependencies = ["lm-eval[api]", "transformers"]
# ///

import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: ["{{right}}", "{{wrong}}"]
doc_to_target: 0
metric_list:
  - metric: acc
"""
TEXT = """
output_type: generate_until
doc_to_target: "{{right}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 32, temperature: 0}
metric_list:
  - metric: exact_match
"""


def evaluate(folder: Path, task: str, model: str, route: str, *flags: str) -> dict[str, Any]:
    arguments = {
        "model": os.environ["MODEL"],
        "base_url": os.environ["OPENAI_BASE_URL"] + route,
        "tokenizer": os.environ["TOKENIZER"],
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
    }
    described = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = ["lm_eval", "run", "--model", model, "--model_args", described, "--tasks", task]
    command += ["--include_path", str(folder), "--output_path", str(folder / task), *flags]
    subprocess.run(command, check=True, timeout=300)
    (file,) = (folder / task).rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"][task]
    return results


def answer(question: str) -> str:
    """What the server answers to a chat of this question."""
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def main() -> None:
    # The model continues a text that it knows by heart.
    words = os.environ["RESULT"].split()
    known = {"question": " ".join(words[:-2]), "right": " ".join(words[-2:])}
    wrong = "a herd of purple elephants"
    greeting = {"question": "hello", "right": answer("hello")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task, kind, asked in (("choice", CHOICE, known), ("text", TEXT, greeting)):
            data = folder / f"{task}.jsonl"
            data.write_text(json.dumps({**asked, "wrong": wrong}) + "\n")
            (folder / f"{task}.yaml").write_text(TASK.format(name=task, data=data) + kind)
        chosen = evaluate(folder, "choice", "local-completions", "/completions")
        assert chosen["acc,none"] == 1, chosen
        print("log-likelihoods through echo and logprobs: the right text is likelier")
        chat = ("local-chat-completions", "/chat/completions", "--apply_chat_template")
        written = evaluate(folder, "text", *chat)
        assert written["exact_match,none"] == 1, written
        print(f"chat completions: {greeting['right']}")


main()
