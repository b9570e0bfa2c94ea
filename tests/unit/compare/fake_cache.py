"""A llama-server that takes no time: it says how long tokens took, what its cache did and what GGML_SCHED_PROF saw."""

from __future__ import annotations

import sys
from pathlib import Path

from llamafork.compare.target import Target

# A token of stock takes 10 ms, one with the cache 4, cold 9. 8 experts a layer and token, of which 6 hit.
SERVER = """#!{python}
import json, os, signal, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
words, env = sys.argv[1:], os.environ
if "--help" in words:
    sys.exit(print({help!r}))
if "--list-devices" in words:
    there = range(1 + env["GGML_SIM_DEVICES"].count(";"))
    sys.exit(print("Available devices:", *(f"  SIM{{i}}: simulated GPU" for i in there), sep="\\n"))
signal.signal(signal.SIGUSR1, lambda *_: None)
cached, done, stale, prints = "--moe-expert-cache" in words, 0, 0, 0
def props():
    global stale
    stale, seen = done, stale
    return dict(status={status!r}, reason="a reason", hits=6 * seen, misses=2 * seen, uploads=seen // 2, steps=seen,
                devices=[dict(slots=16, upload_us=100 * seen)])
def split(first, last, ms, wait=0, inputs=()):
    return dict(backend="x", first=first, last=last, ns=int(1e6 * ms * runs), wait_ns=int(1e6 * wait * runs), nodes=1,
                inputs=[dict(src="CPU", name=name, ns=int(1e6 * one * runs)) for name, one in inputs])
def profile():
    global prints
    if cached:
        host = env["GGML_SCHED_PROF"] == "1"
        splits = [split("attn", "ids", 0.3)]
        for il in (0, 1):
            splits += [split(f"ffn_moe_slots-{{il}}", "table", 0.1 if host else 1),
                       split(f"ffn_moe_misses-{{il}}", "down", 1.5, 0.1),
                       split("sum", "out", 0.5, 0, [("down", 0.4 if host else 0.2)])]
    else:
        splits = [split("attn", "ids", 1), split("gate", "down", 8), split("add", "out", 0.5, 0, [("down", 0.2)])]
    row = dict(scheduler=0, print=prints, batch=1, n_splits=len(splits), n_nodes=9, runs=runs, ns=int(9.7e6 * runs),
               splits=splits)
    with open(env["GGML_SCHED_PROF_FILE"], "a") as out:
        print(json.dumps(row), file=out)
    prints += 1
runs = 0
class Handler(BaseHTTPRequestHandler):
    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(dict(status="ok", moe_cache=props()) if cached else dict(status="ok"))
    def do_POST(self):
        global done, runs
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = body["n_predict"] - {short} * (body["n_predict"] > 1)
        ms = 10.0 if not cached else 9.0 if done == 0 else 4.0
        if len(body["prompt"]) == 1:
            done += n
            if "GGML_SCHED_PROF" in env:
                for _ in range(n):
                    runs += 1
                    profile()
        self.answer(dict(timings=dict(predicted_n=n, predicted_ms=ms * (n - 1))))
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


def program(folder: Path, *, flag: str = "--moe-expert-cache", status: str = "active", short: int = 0) -> Target:
    """``short``: tokens that it does not write."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SERVER.format(python=sys.executable, help=flag, status=status, short=short)
    (folder / "llama-server").write_text(text)
    (folder / "llama-server").chmod(0o755)
    return Target("x", folder)
