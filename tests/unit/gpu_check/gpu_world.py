"""A fake cmake that "builds" fake programs, a small archive, and the check run on them in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_check import archive, cache_speed, command, machine, model, speed, toolkit

CMAKE = """#!{python}
import os, pathlib, sys, time
words = sys.argv[1:]
log = pathlib.Path(os.environ["FAKE_LOG"])
log.open("a").write("\\0".join(words) + "\\n")
if words == ["--version"]:
    print("cmake version 3.28.1")
elif "--build" in words:
    source = pathlib.Path(words[words.index("--build") + 1]).parent / "src"
    kind = "fork" if any(source.rglob("fork.txt")) else "stock"
    if kind in os.environ.get("FAKE_BROKEN", ""):
        print("[3/9 1.0 s] Building CXX object x.o")
        print("../src/main.cpp:7:1: error: this is wrong")
        sys.exit(1)
    time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
    out = pathlib.Path(words[words.index("--build") + 1]) / "bin"
    out.mkdir(parents=True)
    for name in [words[n + 1] for n, word in enumerate(words) if word == "--target"]:
        text = pathlib.Path(os.environ["FAKE_PROGRAMS"], name)
        (out / name).write_text(text.read_text() if text.exists() else "#!/bin/sh\\n")
        (out / name).chmod(0o755)
    (out / ("libggml-" + os.environ["FAKE_BACKEND"] + ".so")).write_text(kind)
else:
    pathlib.Path(words[words.index("-B") + 1]).mkdir(exist_ok=True)
"""
BENCH = """#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
device = os.environ.get("FAKE_DEVICE", "CUDA0")
if "--list-devices" in words:
    print("Available devices:")
    print(f"  {{device}}: a fake card (143771 MiB, 143000 MiB free)" if device else "  (none)")
elif "--version" in words:
    print("version: b11434, series abc")
else:
    if os.environ.get("FAKE_BENCH") == "crash":
        print("CUDA error: out of memory", file=sys.stderr)
        sys.exit(1)
    if file := os.environ.get("GGML_SCHED_PROF_FILE"):
        copies = [dict(src="CUDA0", name="x", runs=4, bytes=400, ns=4000)]
        splits = [dict(backend="CUDA0", nodes=3, ns=40000, runs=4, inputs=[]),
                  dict(backend="CPU", nodes=3, ns=36000, runs=4, inputs=copies)]
        pathlib.Path(file).write_text(json.dumps(dict(batch=1, runs=4, ns=100000, n_splits=2, splits=splits)) + "\\n")
"""
SERVER = """#!{python}
import http.server, json, os, pathlib, socketserver, sys, time
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
kind = pathlib.Path(__file__).parent.name
mood = os.environ.get("FAKE_SERVER", "").split(":")
mood = "" if mood[1:] not in ([], [kind]) else mood[0]
asked = 0

def note(**what):
    with pathlib.Path(os.environ["FAKE_LOG"] + ".server").open("a") as out:
        out.write(json.dumps(dict(kind=kind, pid=os.getpid(), **what)) + "\\n")

def say(text):
    print(text, file=sys.stderr, flush=True)

def crash():
    say("CUDA error: out of memory")
    os._exit(1)

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def answer(self, what, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def do_GET(self):
        if self.path == "/props":
            state = os.environ.get("FAKE_CACHE", "active")
            slots = int(value("--moe-expert-cache")) if "--moe-expert-cache" in words else 0
            return self.answer(dict(moe_cache=dict(status=state, reason="too small", hit_rate=min(1.0, asked / 8),
                                                   devices=[dict(slots=max(slots, 4))])))
        self.answer(dict(status="ok"))

    def do_POST(self):
        global asked
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.answer(dict(tokens=[len(word) for word in body["content"].split()]))
        note(body=body)
        asked += 1
        if mood == "dies" and asked == 6:
            crash()
        if mood == "refuses":
            return self.answer(dict(error="no slot"), 500)
        if mood == "hangs" and asked == 6:
            time.sleep(60)
        prompt, decode = len(body["prompt"]), body["n_predict"]
        rate = (60.0 if "--moe-expert-cache" in words else 30.0) if kind == "fork" else 20.0
        timings = dict(prompt_n=prompt - (mood == "cached"), prompt_ms=100 * prompt / rate,
                       predicted_n=decode, predicted_ms=1000 * decode / rate)
        self.answer(dict(timings=timings, tokens=[body["seed"]] * decode) if mood != "mute" else dict())

say("load_tensors: " + ("CPU" if mood == "cpu" else value("-dev")) + " model buffer size =    12.50 MiB")
say("load_tensors: " + value("-dev").rstrip("0") + "_Host model buffer size =    12.50 MiB")
note(words=words)
if mood == "crash":
    crash()
socketserver.TCPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""
OPS = """#!{python}
import os, sys
print("Testing 2 devices\\n\\nBackend 1/2: " + sys.argv[sys.argv.index("-b") + 1])
mood = os.environ.get("FAKE_OPS", "")
for n in range(0 if mood == "none" else 3):
    bad = mood == "fail" and n == 1
    said = "[MUL_MAT_ID] MAA = 2 > 1 \\x1b[1;31mFAIL\\x1b[0m" if bad else "\\x1b[1;32mOK\\x1b[0m"
    print(f"  MUL_MAT_ID(type_a=q8_0,n={{n}}): {{said}}")
if mood == "none":
    print("2/2 backends passed")
else:
    print("  2/3 tests passed" if mood == "fail" else "  3/3 tests passed")
sys.exit(1 if mood == "fail" else 0)
"""
RESULTS = """#!{python}
import os, pathlib, sys
kind = pathlib.Path(__file__).parent.name
words = sys.argv[1:]
odd = os.environ.get("FAKE_RESULTS") == "odd" and kind == "fork" and words[words.index("-ub") + 1] == "1"
pathlib.Path(words[words.index("-o") + 1]).write_text("other logits" if odd else "logits")
"""
PERPLEXITY = """#!{python}
import os, pathlib, sys
words = sys.argv[1:]
mood = os.environ.get("FAKE_PERPLEXITY", "")
if "--kl-divergence-base" in words and "--kl-divergence" not in words:
    pathlib.Path(words[words.index("--kl-divergence-base") + 1]).write_text("base")
if "--kl-divergence" in words:
    kl = 0.5 if mood == "differs" and "--moe-expert-cache" in words else 0.00001
    print(f"Mean PPL(Q) : 10.1 x\\nMean PPL(base) : 10.0 x\\nMean    KLD: {{kl}} x\\nSame top p: 99.5 x")
if "--moe-expert-cache" in words:
    if mood == "off":
        print("W expert cache: off: the model has no experts", file=sys.stderr)
    elif mood == "audit" and "LLAMA_MOE_CACHE_AUDIT" in os.environ:
        print("expert cache: slot 3 of w does not hold expert 7", file=sys.stderr)
        sys.exit(134)
    else:
        last = len(words) - 1 - words[::-1].index("-dev")
        for device in words[last + 1].split(",")[:1 if mood == "one" else None]:
            print(f"I expert cache: {{device}}: 8 slots in each of 4 layers (0-3)", file=sys.stderr)
        print("W expert cache: 61.5 % hits, 40 uploads (3.0 hits each, 1.0 MiB), 0 failed, 0 waits, "
              "32 decodes with it, 0 without", file=sys.stderr)
"""
MAKER = """
import json, pathlib, sys
pathlib.Path(sys.argv[1]).write_bytes(b"m" * 1000)
print(json.dumps({"name": "fake", "bytes": 1000, "sha256": "0", "expert_bytes": 800, "layers": 8, "params": 1,
                  "active_params": 1, "spec": {"n_expert": 16, "n_expert_used": 4},
                  "lru_hit_rates": {"0.125": 0.5, "0.5": 0.8}}))
"""
CASES = speed.cases
STOCK = {"tree": "5" * 40, "removed": ["fork.txt"]}
FILES = {
    "manifest.json": json.dumps({
        "schema": archive.SCHEMA, "series": "a" * 40, "changes": ["one"], "stock": {"cuda": STOCK, "sim": STOCK},
        "pin": {"build": 11434, "version": "b11434", "tree": "b" * 40},
    }).encode(),
    "src/main.cpp": b"int fork;\n", "src/same.cpp": b"int same;\n", "src/fork.txt": b"this is the fork\n",
    "stock/cuda/main.cpp": b"int stock;\n", "stock/sim/main.cpp": b"int stock;\n",
    "repo/llamafork/__init__.py": b"", "site/yaml/__init__.py": b"",
}  # fmt: skip


class GpuWorld:
    """``env`` sets variables that the fakes obey (FAKE_…)."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.env = base, monkeypatch
        self.out, self.work, self.packed = base / "out", base / "work", base / "a.tar.xz"
        self.log = base / "cmake.log"
        for name, text in (("cmake", CMAKE), ("ninja", "#!/bin/sh\necho 1.11\n")):
            self.script(base / "bin" / name, text)
        fakes = {
            "llama-bench": BENCH,
            "llama-server": SERVER,
            "test-backend-ops": OPS,
            "llama-results": RESULTS,
            "llama-perplexity": PERPLEXITY,
        }
        for name, text in fakes.items():
            self.script(base / "programs" / name, text)
        (base / "maker.py").write_text(MAKER)
        archive.write(self.packed, FILES)
        monkeypatch.setenv("PATH", f"{base / 'bin'}:/usr/bin:/bin")
        for name, value in (("LOG", self.log), ("PROGRAMS", base / "programs"), ("BACKEND", "cuda")):
            monkeypatch.setenv(f"FAKE_{name}", str(value))
        monkeypatch.setattr(model, "MAKER", base / "maker.py")
        monkeypatch.setattr(speed, "cases", lambda layers: CASES(layers)[:2])
        monkeypatch.setattr(cache_speed, "SHARES", (0.5,))
        monkeypatch.setattr(machine, "free_memory", lambda: 140 << 30)
        monkeypatch.setattr(machine, "gpus", lambda: ["a fake card, 143771 MiB, 580, 9.0"])
        monkeypatch.setattr(toolkit, "find", lambda: toolkit.Toolkit(base / "nvcc", base, None, ""))

    def script(self, file: Path, text: str) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.format(python=sys.executable) if "{python}" in text else text)
        file.chmod(0o755)

    def run(self, *words: str) -> int:
        return command.main(["run", "--archive", str(self.packed), "--out", str(self.out), "--work", str(self.work),
                             "--jobs", "16", *words])  # fmt: skip

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "record.json").read_text())
        return found

    @property
    def stages(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.record["stages"]}

    @property
    def states(self) -> dict[str, str]:
        return {name: one["state"] for name, one in self.stages.items()}

    @property
    def served(self) -> list[dict[str, Any]]:
        """What the servers did in turn, by kind and pid: ``words`` of a start, ``body`` of a completion."""
        file = Path(f"{self.log}.server")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def completions(self) -> list[dict[str, Any]]:
        return [one for one in self.served if "body" in one]
