"""A llama-server that does as FAKE_MOOD says (words with commas between) and records argv, env and its processes.

``--help`` speaks the vocabulary named by FAKE_HELP and anything not in it is rejected, as upstream does.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

COMMON = """----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-c,    --ctx-size N                     size of the prompt context (default: 0)
-fa,   --flash-attn {fa}set Flash Attention use
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM
-mg,   --main-gpu INDEX                 the GPU to use
--control-vector-layer-range START END
                                        layer range to apply the control vector(s) to
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
-m,    --model FNAME                    model path to load
-hf,   -hfr, --hf-repo <user>/<model>[:quant]
                                        Hugging Face model repository
-mu,   --model-url MODEL_URL            model download url
--temp, --temperature N                 temperature
-p,    --prompt PROMPT                  prompt
-a,    --alias STRING                   set model name aliases
--host HOST                             ip address to listen
--port PORT                             port to listen (default: 8080)
--reuse-port                            share the port
--api-key KEY                           API key to use for authentication
--api-key-file FNAME                    path to file containing API keys
--api-prefix PREFIX                     prefix path the server serves from
--ssl-key-file FNAME                    path to file a PEM-encoded SSL private key
--ssl-cert-file FNAME                   path to file a PEM-encoded SSL certificate
--models-dir PATH                       directory containing models for the router server
--slots, --no-slots                     expose slots monitoring endpoint
"""
CURRENT = """-lm,   --load-mode MODE                 model loading mode (default: auto)
                                        - none: no special loading mode
--spec-draft-model, -md, --model-draft FNAME
                                        draft model for speculative decoding
--spec-draft-n-max N                    number of tokens to draft
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
--ui, --webui, --no-ui, --no-webui      whether to enable the Web UI
"""
OLD = """--mlock                                 force system to keep model in RAM
--no-mmap                               do not memory-map model
-md,   --model-draft FNAME              draft model
--draft-max, --draft, --draft-n N       number of tokens to draft
--webui, --no-webui                     whether to enable the Web UI
"""
FA = {"current": "[on|off|auto]       ", "fork": "[on|off|auto]       ", "old": "                    "}
MORE = {"current": CURRENT, "fork": CURRENT + "--moe-expert-cache N                    slots for experts\n", "old": OLD}

mood = set(os.environ.get("FAKE_MOOD", "").split(","))
kind = os.environ.get("FAKE_HELP", "current")
record = os.environ.get("FAKE_RECORD")
argv = sys.argv[1:]


def note(**more):
    if record:
        facts = {"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid(), "group": os.getpgid(0), **more}
        part = pathlib.Path(record + ".tmp")
        part.write_text(json.dumps(facts))
        part.replace(record)


def number_of(prefix):
    return next((float(word.removeprefix(prefix)) for word in mood if word.startswith(prefix)), None)


help_text = COMMON.format(fa=FA[kind]) + MORE[kind]
if "broken" in mood:
    print("error while loading shared libraries: libcuda.so.1: cannot open shared object file", file=sys.stderr)
    sys.exit(127)
if "--help" in argv:
    print(help_text)
    sys.exit(0)
if "--version" in argv:
    print("version: fake")
    sys.exit(0)

extra = {}
values, at = {}, 0
known = {}
for line in help_text.splitlines():
    if line.startswith("-") and not line.startswith("-----"):
        names = [word.strip(",") for word in line.split() if word.startswith("-")]
        rest = [w for w in line[: 40 if len(line) > 40 and line[39] == " " else None].split() if not w.startswith("-")]
        known.update(dict.fromkeys(names, len(rest) if rest and rest[0].isupper() and len(rest) == 2 else bool(rest)))
while at < len(argv):
    flag = argv[at].replace("_", "-") if argv[at].startswith("--") else argv[at]
    if flag not in known:
        print(f"error: invalid argument: {flag}", file=sys.stderr)
        sys.exit(1)
    count = int(known[flag])
    values[flag] = argv[at + 1 : at + 1 + count]
    at += 1 + count

if "last-words" in mood:
    print("ggml_cuda_init: found 1 device\nerror: out of memory on CUDA0", file=sys.stderr, flush=True)
    sys.exit(int(number_of("code=") or 0))
if "stubborn" in mood:
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
else:

    def leave(number, _):
        note(signal=number, **extra)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
if "grandchild" in mood:
    script = "import signal as s, time; [s.signal(n, s.SIG_IGN) for n in (1, 2, 15)]; print(flush=True); time.sleep(60)"
    grand = subprocess.Popen([sys.executable, "-IS", "-c", script], stdout=subprocess.PIPE)
    grand.stdout.readline()
    extra["grandchild"] = grand.pid
if "detached" in mood:
    grand = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(60)"], start_new_session=True)
    extra["detached"] = grand.pid

started = time.monotonic()
ready_after = number_of("ready=") or 0.0
dies_after = number_of("dies=")
host = values.get("--host", ["127.0.0.1"])[0]
prefix = values.get("--api-prefix", [""])[0]
if host.endswith(".sock"):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(host)
else:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, int(values["--port"][0])))
listener.listen(16)
if "--ssl-cert-file" in values:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(values["--ssl-cert-file"][0], values["--ssl-key-file"][0])
    listener = context.wrap_socket(listener, server_side=True)
note(**extra)
print("out: bound\x1b[0m \xe4", flush=True)
if "no-end-of-line" in mood:
    print("loading ....", end="", file=sys.stderr, flush=True)


def answer():
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            continue
        with peer:
            path = peer.recv(4096).split(b" ")[1].decode()
            loading = time.monotonic() - started < ready_after
            page = path == prefix + "/" and "page" in mood
            code = 200 if page or path == prefix + "/v1/models" or (path == prefix + "/health" and not loading) else 503
            peer.sendall(f"HTTP/1.1 {code} X\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())


threading.Thread(target=answer, daemon=True).start()
while True:
    time.sleep(0.1)
    if "chatty" in mood:
        print(f"load: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    if dies_after is not None and time.monotonic() - started > dies_after:
        print("error: tensor 'blk.7.ffn' is cursed", file=sys.stderr, flush=True)
        os._exit(int(number_of("code=") or 0))
