"""GuideLLM: loads of completions and of chats."""

# /// script
# dependencies = ["guidellm"]
# ///

import json
import os
import subprocess
import tempfile
from pathlib import Path

NUM_REQUESTS = 40


def main() -> None:
    for route in ("/v1/completions", "/v1/chat/completions"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "report.json")
            url, model = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["MODEL"]
            options = {
                "backend": f"kind=openai_http,target={url},model={model},request_format={route}",
                "profile": "kind=concurrent,streams=8",
                "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
                "tokenizer": f"kind=hf_auto,model={os.environ['TOKENIZER']}",
                "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
                "output": f"kind=json,path={file}",
            }
            flags = [word for name, value in options.items() for word in (f"--{name}", value)]
            command = ["guidellm", "run", *flags, "--disable-console"]
            subprocess.run(command, check=True, timeout=300)
            requests = json.loads(file.read_text())["benchmarks"][0]["requests"]
        assert len(requests["successful"]) >= NUM_REQUESTS, requests
        assert not requests["errored"], requests["errored"]
        print(f"{route}: {len(requests['successful'])} requests")


main()
