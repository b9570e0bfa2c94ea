"""Off means stock: the same graph, the same splits, every logit bit for bit, the same words.

For each place and batch width a target runs llama-results, upstream's own tool, which decodes a text and writes all its
logits; the scheduler's debug dump names every node, its backend and its split. Then its server completes the text; of a
model with an MTP block a second time, with drafts of that block.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamafork import console, proc
from llamafork.compare.target import Place, Target, at, environment
from llamafork.errors import UnhealthyError
from llamafork.facts.gguf_file import check_model
from llamafork.run import client

TEXT = (
    "The expert cache keeps the experts in use in the memory of the device, and the host computes the rest of them "
    "meanwhile. A prompt warms it; a restart does not cool it down. What is not in use makes room for what is.\n"
)
WIDTHS = (1, 8, 512)  # one token at a time as in decode, a small batch, a whole prompt
STAMP = re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} [A-Z](?: |$)")
PORT = re.compile(r"\[127\.[\d.:]*\]?")  # of an RPC server of this run, sometimes cut off
DUMP = re.compile(r"^(## SPLIT #\d+: .*|node #.*)$")
WORDS = 32
ANSWER, DRAFTED = 0, -1  # in place of a width: what the server says, and what it says with drafts
DRAFTS = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
LAST = "writing results to"  # said after all is computed; a busy machine may cut the log before it
TRIES = 10


@dataclass(frozen=True)
class Outcome:
    """What one target did at one place with one width, or :data:`ANSWER` or :data:`DRAFTED`."""

    logits: str  # hash of the file of logits; of the server's answer with its probabilities
    dump: tuple[str, ...] = ()  # of the splits; with drafts, how many there were


@dataclass(frozen=True)
class Difference:
    place: str
    width: int
    what: str
    detail: str


def run(
    target: Target, place: Place, model: Path, scratch: Path, *, widths: Sequence[int] = WIDTHS
) -> dict[int, Outcome]:
    """All outcomes of *target* at *place*. Raises :class:`UnhealthyError` when a program fails."""
    scratch.mkdir(parents=True, exist_ok=True)
    text = scratch / "text"
    text.write_text(TEXT, encoding="utf-8")
    found: dict[int, Outcome] = {}
    with at(place, target) as args:
        common = ["-m", str(model), *args, "-t", "1", "-c", "512"]
        for width in widths:
            found[width] = _results(target, place, common, text, scratch, width)
        found[ANSWER] = _answer(target, place, common, scratch)
        if has_mtp(model):
            found[DRAFTED] = _drafted(target, place, common, scratch)
    return found


def has_mtp(model: Path) -> bool:
    """Whether it has a block of its own to draft with."""
    facts = check_model(model)[0]
    return bool(facts.values.get(f"{facts.architecture}.nextn_predict_layers"))


def _results(target: Target, place: Place, common: list[str], text: Path, scratch: Path, width: int) -> Outcome:
    out = scratch / "logits.gguf"
    flags = ["-f", str(text), "-b", "512", "-ub", str(width), "-lv", "5", "-o", str(out)]
    command: list[str | Path] = [target.program("llama-results"), *common, *flags]
    for _ in range(TRIES):
        out.unlink(missing_ok=True)
        done = proc.run(command, env=environment(place, {"GGML_SCHED_DEBUG": "2"}), timeout=600, guarded=True)
        if not done.ok or not out.is_file():
            last = (done.err or done.out).strip().splitlines()[-1:] or [f"exit {done.code}"]
            raise UnhealthyError(f"llama-results of {target.name} failed at {place.name}", why=last[0][:300])
        if LAST in done.out + done.err:
            return Outcome(hashlib.sha256(out.read_bytes()).hexdigest(), dump(done.out + done.err))
    raise UnhealthyError(
        f"llama-results of {target.name} lost the end of its log {TRIES} times",
        why="its log ends with the process, written or not",
        do="run it again when the machine has less to do",
    )


def dump(text: str) -> tuple[str, ...]:
    """The scheduler's splits and nodes out of a log, without time stamps and ports.

    The log starts a new line at each stamp but those inside of a dump's line, which the stamp interrupts.
    """
    lines = (PORT.sub("", STAMP.sub("", line)).rstrip() for line in text.splitlines())
    return tuple(line for line in lines if DUMP.match(line))


def _answer(target: Target, place: Place, common: list[str], scratch: Path) -> Outcome:
    command: list[str | Path] = [target.program("llama-server"), *common, "-np", "1", "--no-warmup"]
    body = {"prompt": TEXT, "n_predict": WORDS, "temperature": 0, "n_probs": 8, "return_tokens": True,
            "ignore_eos": True, "cache_prompt": False}  # fmt: skip
    with client.running(command, scratch / "server.log", env=environment(place)) as server:
        data = server.post("/completion", body)
    kept = {key: data[key] for key in ("content", "tokens", "completion_probabilities")}
    drafts = [f"{name} {data['timings'][name]}" for name in ("draft_n", "draft_n_accepted") if name in data["timings"]]
    return Outcome(hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(), tuple(drafts))


def _drafted(target: Target, place: Place, common: list[str], scratch: Path) -> Outcome:
    """Upstream has no graph for the block of some architectures: what neither can is no difference, but is told."""
    try:
        return _answer(target, place, [*common, *DRAFTS], scratch)
    except UnhealthyError as error:
        console.warn(f"{target.name} cannot draft at {place.name}: {error.why}")
        return Outcome("no drafts")


WORDINGS = {
    ANSWER: ("words or their probabilities", "drafts without being asked"),
    DRAFTED: ("words with drafts, or their probabilities", "number of drafts"),
}


def differences(place: Place, ours: dict[int, Outcome], theirs: dict[int, Outcome]) -> list[Difference]:
    """What is not the same. No dump at all is a difference too: then nothing was compared."""
    found = []
    for width, mine in ours.items():
        other = theirs[width]
        what, more = WORDINGS.get(width, ("logits", "splits"))
        if mine.logits != other.logits:
            found.append(Difference(place.name, width, what, f"{mine.logits[:12]} and {other.logits[:12]}"))
        if width > 0 and not (mine.dump and other.dump):
            found.append(Difference(place.name, width, more, "a program printed no splits"))
        elif mine.dump != other.dump:
            found.append(Difference(place.name, width, more, first_difference(mine.dump, other.dump)))
    return found


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    for number, (one, two) in enumerate(zip(ours, theirs, strict=False)):
        if one != two:
            return f"line {number}: {one.strip()[:160]!r} and {two.strip()[:160]!r}"
    longer = "the first" if len(ours) > len(theirs) else "the second"
    return f"{longer} has {abs(len(ours) - len(theirs))} lines more"
