"""`scripts/quickstart`: the whole path once, on real input, with every step named as it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from llamafork import cli, console, paths, proc
from llamafork.errors import Exit, LlamaforkError, UnhealthyError
from llamafork.run import client

QUESTION = "How do I open a file?"
MADE = "quickstart"
TRAINED = Path("tests/data/moe-small.gguf")


def main() -> int:
    about = "build, serve a small model, ask one question, stop"
    argparse.ArgumentParser(prog="scripts/quickstart", description=about).parse_args()
    console.configure()
    where = paths.find()
    started = time.monotonic()
    console.say("1/3  build the fork (upstream is fetched and patched first)", style="bold")
    code = cli.main(["build"])
    if code != 0:
        return code
    trained = where.repo / TRAINED if where.repo else None
    if trained is not None and trained.is_file():
        console.say("2/3  take the small trained MoE model (it has read Python's library)", style="bold")
        model = trained
    else:
        console.say("2/3  write a small MoE model (random weights: it babbles)", style="bold")
        model = where.data / "models" / f"{MADE}.gguf"
        if not model.is_file() and (code := cli.main(["make-model", "--name", MADE, str(model)])) != 0:
            return code
    console.say(f"  {paths.show(model)}")
    console.say("3/3  serve it and ask one question", style="bold")
    try:
        _chat(model)
    except LlamaforkError as error:
        console.failure(error)
        return int(error.code)
    console.say(f"done in {time.monotonic() - started:.0f} s. What next:", style="bold")
    for line in (
        ".venv/bin/llamafork serve -m your-model.gguf     serve a model of your own",
        ".venv/bin/llamafork build --stock                the twin without patches, to compare with",
        ".venv/bin/llamafork patch list                   what this fork changes",
        "README.md                                        where things are",
    ):
        console.say(f"  {line}")
    return 0


def _chat(model: Path) -> None:
    serve = ["serve", "-m", str(model), "-c", "2048"]
    console.say(f"  $ {proc.command_line(['llamafork', *serve])}")
    log = paths.find().state / "logs" / "quickstart-serve.log"
    with client.running([sys.executable, "-m", "llamafork", *serve], log, timeout=120) as server:
        _ask(server)
    console.say(f"  server stopped (exit {server.process.returncode})")


def _ask(server: client.Client) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 120, "temperature": 0.5, "seed": 1}
    data = server.post("/v1/chat/completions", body, timeout=120)
    message = data["choices"][0]["message"]
    text = message.get("content") or message.get("reasoning_content") or ""
    if not text:
        raise UnhealthyError("the reply is empty", why=json.dumps(data)[:300])
    speed = data.get("timings", {})
    props = server.get("/props")
    console.say(f"  you:   {QUESTION}")
    console.say(f"  model: {text.strip()!r}")
    console.say(
        f"  speed: {speed.get('predicted_per_second', 0):.0f} tokens/s decode, "
        f"{speed.get('prompt_per_second', 0):.0f} tokens/s prefill, {data['usage']['completion_tokens']} tokens"
    )
    console.say(f"  build: {props.get('build_info')}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
