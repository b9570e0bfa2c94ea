"""`scripts/quickstart`: the whole path once, on real input, with every step named as it runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests

from llamafork import cli, console, paths, proc
from llamafork.errors import Exit, LlamaforkError, UnhealthyError

QUESTION = "What is a mixture of experts?"
MODEL = "quickstart"


def main() -> int:
    about = "build, write a small model, serve it, ask one question, stop"
    argparse.ArgumentParser(prog="scripts/quickstart", description=about).parse_args()
    console.configure()
    where = paths.find()
    started = time.monotonic()
    model = where.data / "models" / f"{MODEL}.gguf"
    console.say("1/3  build the fork (upstream is fetched and patched first)", style="bold")
    steps = [["build"]]
    if not model.is_file():
        steps.append(["make-model", "--name", MODEL, str(model)])
    for number, words in enumerate(steps):
        if number:
            console.say("2/3  write a small MoE model (random weights: it babbles)", style="bold")
        code = cli.main(words)
        if code != 0:
            return code
    console.say("3/3  serve it and ask one question", style="bold")
    try:
        _chat(model)
    except LlamaforkError as error:
        console.failure(error)
        return int(error.code)
    except requests.RequestException as error:
        failed = UnhealthyError("the server did not answer the request", why=str(error), do="run it again")
        console.failure(failed)
        return int(failed.code)
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
    port = _free_port()
    command = [sys.executable, "-m", "llamafork", "serve", "-m", str(model), "--port", str(port), "-c", "2048"]
    console.say(f"  $ {proc.command_line(['llamafork', *command[3:]])}")
    log = paths.find().state / "logs" / "quickstart-serve.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            _wait(server, port, log)
            _ask(port)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait()  # serve itself kills a server that does not stop in time
    console.say(f"  server stopped (exit {code})")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # a proxy has no business between us and this machine
    return session


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            if _session().get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.1)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    raise UnhealthyError("the server did not become ready", why=" | ".join(last), do=f"see {log}")


def _ask(port: int) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0, "seed": 1}
    session = _session()
    answer = session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120)
    if answer.status_code != 200:
        raise UnhealthyError(f"the chat request failed with {answer.status_code}", why=answer.text[:300])
    data = answer.json()
    message = data["choices"][0]["message"]
    text = message.get("content") or message.get("reasoning_content") or ""
    if not text:
        raise UnhealthyError("the reply is empty", why=json.dumps(data)[:300])
    speed = data.get("timings", {})
    props = session.get(f"http://127.0.0.1:{port}/props", timeout=10).json()
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
