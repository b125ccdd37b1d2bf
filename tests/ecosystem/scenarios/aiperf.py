"""AIPerf: a load of streamed chats."""

# /// script
# dependencies = ["aiperf"]
# ///

import json
import os
import subprocess
import tempfile
from pathlib import Path

NUM_REQUESTS = 40


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        load = ["--request-count", str(NUM_REQUESTS), "--concurrency", "8"]
        load += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
        server = ["--model", os.environ["MODEL"], "--endpoint-type", "chat", "--streaming"]
        server += ["--url", os.environ["OPENAI_BASE_URL"].removesuffix("/v1")]
        files = ["--tokenizer", os.environ["TOKENIZER"], "--artifact-dir", folder, "--ui", "none"]
        subprocess.run(["aiperf", "profile", *server, *load, *files], check=True, timeout=300)
        report = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
    assert report["completed_request_count"]["avg"] == NUM_REQUESTS, report["error_summary"]
    assert not report["error_summary"]
    first, rate = report["time_to_first_token"], report["output_token_throughput"]
    print(f"{NUM_REQUESTS} chats: first token {first['p50']:.0f} ms, {rate['avg']:.0f} tokens/s")


main()
