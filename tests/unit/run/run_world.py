"""A fake llama-server, a tiny model, and the wrapper as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llamafork.paths import Paths
from llamafork.run import client

FAKE = Path(__file__).with_name("fake_server.py")
# The real main, without the argument lists of verbs that these tests do not use.
MAIN = "import sys; from llamafork import cli; cli._lazy_model_arguments = lambda at: None; sys.exit(cli.main())"
CLEAN = ("LLAMA_", "LLAMAFORK_", "HF_", "HUGGINGFACE_", "XDG_", "PYTHON")


def wait_for(what: Callable[[], object], seconds: float = 8.0) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody reaps counts as ended only if it is not our child."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def no_zombies(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def tiny_gguf() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    table = text("token_embd.weight") + struct.pack("<Iqq", 2, 32, 2) + struct.pack("<IQ", 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + pairs + table
    return head + b"\0" * (-len(head) % 32) + b"\1" * 256


@dataclass
class Wrapper:
    """``llamafork VERB …`` as a process."""

    process: subprocess.Popen[bytes]
    record: Path
    lines: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, object]:
        found = json.loads(self.record.read_text())
        assert isinstance(found, dict)
        return found

    def pid(self, name: str = "pid") -> int:
        value = self.facts[name]
        assert isinstance(value, int)
        return value

    def until(self, text: str) -> str:
        """Read stderr up to a line with *text*, for 30 s at most."""
        assert self.process.stderr is not None
        limit = threading.Timer(30, self.process.kill)
        limit.start()
        try:
            for raw in self.process.stderr:
                self.lines.append(raw.decode("utf-8", "replace"))
                if text in self.lines[-1]:
                    return self.lines[-1]
        finally:
            limit.cancel()
        raise AssertionError(f"{text!r} never came:\n{''.join(self.lines)}")

    def end(self, seconds: float = 10.0) -> tuple[int, str, str]:
        """Code (negative for a signal), stdout, and all of stderr."""
        out, err = self.process.communicate(timeout=seconds)
        said = "".join(self.lines) + err.decode("utf-8", "replace")
        return self.process.returncode, out.decode("utf-8", "replace"), said


class World:
    """A folder with programs, a model, and the environment of the wrapper."""

    def __init__(self, root: Path, bytecode: Path) -> None:
        self.root = root
        self.programs = root / "programs"
        self.programs.mkdir()
        for name in ("llama-server", "llama-cli", "llama-bench"):
            self.program(name, FAKE.read_text())
        self.model = root / "tiny.gguf"
        self.model.write_bytes(tiny_gguf())
        self.record = root / "record.json"
        self.port = client.free_port()
        self.started: list[subprocess.Popen[bytes]] = []
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(CLEAN)} | {
            "HOME": str(root / "home"),
            "LLAMAFORK_HOME": str(root / "own"),
            "LLAMAFORK_PROGRAM_DIR": str(self.programs),
            "FAKE_RECORD": str(self.record),
            "NO_COLOR": "1",
            "PYTHONPYCACHEPREFIX": str(bytecode),
        }

    @property
    def paths(self) -> Paths:
        own = self.root / "own"
        return Paths(own / "cache", own / "data", own / "state", None, self.root)

    def program(self, name: str, source: str) -> Path:
        path = self.programs / name
        path.write_text(f"#!{sys.executable} -IS\n{source}")
        path.chmod(0o755)
        return path

    def command(self, *words: str | bytes | Path) -> list[str | bytes | Path]:
        return [sys.executable, "-c", MAIN, *words]

    def start(self, *words: str | bytes | Path, mood: str = "", tool: list[str] | None = None, **env: str) -> Wrapper:
        process = subprocess.Popen(
            [*(tool or []), *self.command(*words)],
            env={**self.env, "FAKE_MOOD": mood, **env},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(process)
        return Wrapper(process, self.record)

    def serve(self, *words: str | bytes | Path, mood: str = "", tool: list[str] | None = None, **env: str) -> Wrapper:
        port = ("--port", str(self.port))
        return self.start("serve", "-m", self.model, *port, *words, mood=mood, tool=tool, **env)

    def clean_up(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if self.record.exists():
            facts = json.loads(self.record.read_text())
            for name in ("grandchild", "detached", "pid"):
                if name in facts and not gone(facts[name]):
                    os.kill(facts[name], signal.SIGKILL)


def split_parts(folder: Path, count: int = 2) -> list[Path]:
    """Header-only parts of a split model."""
    paths = []
    for number in range(count):
        pairs = b"".join(
            struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, value)
            for key, value in ((b"split.no", number), (b"split.count", count))
        )
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pairs)
        paths.append(path)
    return paths
