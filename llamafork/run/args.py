"""The command line of serve, cli and bench: our few options, the program's own flags, and what they say."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llamafork.errors import UsageError
from llamafork.run.vocabulary import Vocabulary

SERVE = ("--build", "--dry-run", "--ready-timeout", "--grace", "--json")
TOOL = ("--build", "--dry-run", "--json")
SWITCHES = ("--dry-run", "--json")
GRACE_SECONDS = 30.0
LOOPBACK = ("localhost", "::1", "[::1]")


@dataclass(frozen=True)
class Own:
    """Our options. Times in seconds; ``ready_timeout`` None: wait as long as the server lives."""

    build: str | None = None
    dry_run: bool = False
    ready_timeout: float | None = None
    grace: float = GRACE_SECONDS
    json: bool = False


@dataclass(frozen=True)
class Setting:
    """One flag of the command, normalised, with its values; ``at`` is its index in the words."""

    at: int
    flag: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """Words for the program, the flags found in them, and what was changed on the way."""

    words: tuple[str, ...]
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()

    def last(self, names: Sequence[str]) -> Setting | None:
        return next((found for found in reversed(self.settings) if found.flag in names), None)

    def with_value(self, setting: Setting, value: str) -> Command:
        """The same command with the first value of one setting replaced."""
        words = list(self.words)
        words[setting.at + 1] = value
        changed = Setting(setting.at, setting.flag, (value, *setting.values[1:]))
        settings = tuple(changed if found is setting else found for found in self.settings)
        return Command(tuple(words), settings, self.notes)


@dataclass(frozen=True)
class Twin:
    """One upstream setting: its flags and its environment variable."""

    flags: tuple[str, ...]
    env: str


TWINS: dict[str, Twin] = {
    "model": Twin(("-m", "--model"), "LLAMA_ARG_MODEL"),
    "hf_repo": Twin(("-hf", "-hfr", "--hf-repo"), "LLAMA_ARG_HF_REPO"),
    "model_url": Twin(("-mu", "--model-url"), "LLAMA_ARG_MODEL_URL"),
    "models_dir": Twin(("--models-dir",), "LLAMA_ARG_MODELS_DIR"),
    "models_preset": Twin(("--models-preset",), "LLAMA_ARG_MODELS_PRESET"),
    "draft": Twin(("--spec-draft-model", "-md", "--model-draft"), "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    "mmproj": Twin(("-mm", "--mmproj"), "LLAMA_ARG_MMPROJ"),
    "host": Twin(("--host",), "LLAMA_ARG_HOST"),
    "port": Twin(("--port",), "LLAMA_ARG_PORT"),
    "reuse_port": Twin(("--reuse-port",), "LLAMA_ARG_REUSE_PORT"),
    "api_key": Twin(("--api-key",), "LLAMA_API_KEY"),
    "api_key_file": Twin(("--api-key-file",), "LLAMA_ARG_API_KEY_FILE"),
    "api_prefix": Twin(("--api-prefix",), "LLAMA_ARG_API_PREFIX"),
    "alias": Twin(("-a", "--alias"), "LLAMA_ARG_ALIAS"),
    "ssl_cert": Twin(("--ssl-cert-file",), "LLAMA_ARG_SSL_CERT_FILE"),
}
SOURCES_OF_MODELS = ("model", "hf_repo", "model_url", "models_dir", "models_preset")


@dataclass(frozen=True)
class Known:
    """A setting's value and where it comes from: user, env, config or default."""

    value: str
    source: str


def split(argv: Sequence[str], ours: Sequence[str] = SERVE) -> tuple[Own, tuple[str, ...]]:
    """Take our options out of *argv*; all else stays, in order. Behind ``--`` nothing is ours."""
    found: dict[str, str] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            rest += words
            break
        if word in SWITCHES:
            found[word] = "yes"
        elif word in ours:
            if not words:
                raise UsageError(f"{word} needs a value", do=f"write {word} VALUE")
            found[word] = words.pop(0)
        elif word.partition("=")[0] in ours:
            raise _equals(word.partition("=")[0])
        else:
            rest.append(word)
    ready = _seconds("--ready-timeout", found)
    grace = _seconds("--grace", found)
    grace = GRACE_SECONDS if grace is None else grace
    return Own(found.get("--build"), "--dry-run" in found, ready, grace, "--json" in found), tuple(rest)


def _seconds(flag: str, found: Mapping[str, str]) -> float | None:
    if flag not in found:
        return None
    try:
        value = float(found[flag])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{flag} takes seconds, such as 30 or 0.5")
    return value


def normal(word: str) -> str:
    """A word as upstream compares it: underscores of long flags become hyphens."""
    return word.replace("_", "-") if word.startswith("--") else word


def read(words: Sequence[str], vocabulary: Vocabulary) -> Command:
    """Check every flag against the program's own and apply equal renames.

    Raises :class:`UsageError` that names the flag, never a value: values can be secrets.
    """
    queue, done, settings, notes = list(words), list[str](), list[Setting](), list[str]()
    renamed: dict[str, str] = {}
    while queue:
        word = queue.pop(0)
        flag = normal(word)
        if flag not in vocabulary.arity:
            new, note = _renamed(flag, vocabulary, settings)
            if renamed.setdefault(new[0], flag) != flag:
                raise UsageError(f"{renamed[new[0]]} and {flag} are now both {new[0]}", do=f"choose one {new[0]} value")
            notes.append(note)
            queue[:0] = new
            continue
        if _is_bare(flag, queue, vocabulary):
            value = _bare()[flag]
            queue.insert(0, value)
            notes.append(f"{flag} now takes a value; read as {flag} {value}")
        values = _values(flag, queue, vocabulary)
        settings.append(Setting(len(done), flag, values))
        done += [word, *values]
        del queue[: len(values)]
    return Command(tuple(done), tuple(settings), tuple(notes))


def _values(flag: str, following: Sequence[str], vocabulary: Vocabulary) -> tuple[str, ...]:
    """The words a flag eats. A value may begin with a hyphen, but a number or choice is never another flag."""
    count = vocabulary.arity[flag]
    values = tuple(following[:count])
    swallowed = flag in vocabulary.strict and values and normal(values[0]) in vocabulary.arity
    if len(values) < count or swallowed:
        before = f" before {normal(values[0])}" if swallowed else ""
        raise UsageError(f"{flag} needs a value{before}", do="give one, or leave the flag out")
    return values


def _is_bare(flag: str, following: Sequence[str], vocabulary: Vocabulary) -> bool:
    if flag not in _bare() or vocabulary.arity[flag] != 1:
        return False
    return not following or normal(following[0]) in vocabulary.arity


def _renamed(flag: str, vocabulary: Vocabulary, before: Sequence[Setting]) -> tuple[list[str], str]:
    """The words to use instead of an unknown flag and a note, or the error that explains it."""
    name = flag.partition("=")[0]
    entry = _renames().get(flag)
    if entry and entry.new[0] in vocabulary.arity:
        if entry.equal:
            return list(entry.new), f"{flag} is now {' '.join(entry.new)} ({entry.note}); used that"
        raise UsageError(f"the program has no flag {flag} any more", why=f"see {entry.new[0]}", do=entry.note)
    if flag in vocabulary.removed:
        raise UsageError(f"the flag {flag} has been removed", do=vocabulary.removed[flag])
    if not flag.startswith("-"):
        after = f" behind {before[-1].flag}" if before else ""
        do = "a model is given with -m FILE; quote values with spaces"
        raise UsageError(f"there is a word{after} that belongs to no flag", do=do)
    if name != flag and name in vocabulary.arity:
        raise _equals(name)
    raise _unknown(name, vocabulary)


def _equals(name: str) -> UsageError:
    return UsageError(f"{name}=… is not understood", why="the value is a word of its own", do=f"write {name} VALUE")


def _unknown(name: str, vocabulary: Vocabulary) -> UsageError:
    close = difflib.get_close_matches(name, sorted(vocabulary.arity), n=1, cutoff=0.6)
    do = f"did you mean {close[0]}?" if close else "its --help lists what it knows"
    return UsageError(f"the program has no flag {name}", do=do)


@dataclass(frozen=True)
class Rename:
    new: tuple[str, ...]
    equal: bool
    note: str


@cache
def _table() -> dict[str, list[dict[str, object]]]:
    return tomllib.loads(Path(__file__).with_name("renames.toml").read_text(encoding="utf-8"))


@cache
def _renames() -> dict[str, Rename]:
    found: dict[str, Rename] = {}
    for row in _table()["rename"]:
        old, new = row["old"], row["new"]
        assert isinstance(old, list)
        assert isinstance(new, list)
        found.update(dict.fromkeys(old, Rename(tuple(new), bool(row["equal"]), str(row["note"]))))
    return found


@cache
def _bare() -> dict[str, str]:
    found: dict[str, str] = {}
    for row in _table()["bare"]:
        flags = row["flags"]
        assert isinstance(flags, list)
        found.update(dict.fromkeys(flags, str(row["value"])))
    return found


def known(command: Command, env: Mapping[str, str], config: Mapping[str, str]) -> dict[str, Known]:
    """What the user has set, by name of :data:`TWINS`: command line over environment over llama.cpp's config.ini."""
    found: dict[str, Known] = {}
    for name, twin in TWINS.items():
        setting = command.last(twin.flags)
        if setting is not None:
            found[name] = Known(setting.values[0] if setting.values else "1", "user")
        elif twin.env in env:
            found[name] = Known(env[twin.env], "env")
        else:
            value = next((config[key] for key in _config_keys(twin) if key in config), None)
            if value is not None:
                found[name] = Known(value, "config")
    return found


def _config_keys(twin: Twin) -> list[str]:
    return [twin.env, *(flag.lstrip("-") for flag in twin.flags)]


def config_values(texts: Sequence[str]) -> dict[str, str]:
    """Global keys of llama.cpp's config.ini files, later files over earlier ones (sections none, ``*``, default)."""
    values: dict[str, str] = {}
    for text in texts:
        section = ""
        for line in map(str.strip, text.splitlines()):
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1].strip()
            elif "=" in line and line[0] not in "#;" and section in ("", "*", "default"):
                key, _, value = line.partition("=")
                values[key.strip()] = value.strip()
    return values


def config_files(env: Mapping[str, str]) -> list[Path]:
    """Where llama.cpp looks for config.ini on this system, weakest first (common/arg.cpp)."""
    home = Path(env.get("HOME") or Path("~").expanduser())
    user = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    return [Path("/etc/llama.cpp/config.ini"), user / "llama.cpp" / "config.ini"]


def defaults(settings: Mapping[str, Known], vocabulary: Vocabulary) -> list[tuple[str, str, str]]:
    """Flags we add, each with value and reason, where the user has set nothing. Rules for more flags belong here."""
    ours = [
        ("host", "--host", "127.0.0.1", "reachable from this machine only"),
        ("port", "--port", "8080", "upstream's default, made explicit"),
    ]
    return [
        (flag, value, reason) for name, flag, value, reason in ours if name not in settings and flag in vocabulary.arity
    ]


def is_local(host: str) -> bool:
    """Whether only this machine can connect: a loopback address or a socket file."""
    return host in LOOPBACK or host.startswith("127.") or host.endswith(".sock")


def warnings(settings: Mapping[str, Known]) -> list[str]:
    """Things to say aloud before the start."""
    hosts = [host.strip() for host in settings["host"].value.split(",")] if "host" in settings else []
    open_to_all = [host for host in hosts if host and not is_local(host)]
    has_key = any(settings[name].value for name in ("api_key", "api_key_file") if name in settings)
    if open_to_all and not has_key:
        return [f"anyone who can reach {open_to_all[0]} can use this server; set an API key with --api-key-file FILE"]
    return []
