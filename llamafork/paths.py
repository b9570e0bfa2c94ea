"""Where things live: platform folders, or everything below ``LLAMAFORK_HOME`` when that is set."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from llamafork.errors import EnvironmentFault, UsageError

PACKAGE = Path(__file__).resolve().parent
NO_FILES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class Paths:
    cache: Path  # sources, compiler cache, build folders: may be deleted at any time
    data: Path  # finished builds, generated models
    state: Path  # logs
    repo: Path | None  # the checkout this package runs from, if any
    assets: Path  # holds patches/ and vendor/upstream.toml

    @property
    def patches(self) -> Path:
        return self.assets / "patches"

    @property
    def pin(self) -> Path:
        return self.assets / "vendor" / "upstream.toml"

    @property
    def work_tree(self) -> Path:
        """The patched tree: vendor/llama.cpp of a checkout, else in the user's cache."""
        return self.repo / "vendor" / "llama.cpp" if self.repo else self.cache / "llama.cpp"


def find() -> Paths:
    """The folders of this process; environment: LLAMAFORK_HOME, LLAMAFORK_REPO (a checkout to work on)."""
    home = os.environ.get("LLAMAFORK_HOME")
    if home:
        root = Path(home).expanduser().absolute()
        cache, data, state = root / "cache", root / "data", root / "state"
    else:
        cache = platformdirs.user_cache_path("llamafork", appauthor=False)
        data = platformdirs.user_data_path("llamafork", appauthor=False)
        state = platformdirs.user_state_path("llamafork", appauthor=False)
    named = os.environ.get("LLAMAFORK_REPO")
    repo = Path(named).expanduser().absolute() if named else PACKAGE.parent
    if named and not (repo / "patches" / "series").is_file():
        raise EnvironmentFault(
            f"LLAMAFORK_REPO names no checkout: {show(repo)}",
            why="it has no patches/series",
            do="unset LLAMAFORK_REPO, or point it at a llamafork checkout",
        )
    if not (repo / "patches" / "series").is_file() or not (repo / "vendor" / "upstream.toml").is_file():
        return Paths(cache, data, state, None, PACKAGE / "_data")
    return Paths(cache, data, state, repo, repo)


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """A temporary file beside *target* that replaces it when the block ends without an error.

    A link is replaced itself; what it points to stays. Raises :class:`UsageError` where *target* is no file.
    """
    check_result(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}.{os.getpid()}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete a folder so that an interruption leaves it whole or gone, never in part under its own name."""
    sweep_removed(folder.parent)
    doomed = folder.with_name(f".gone-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def sweep_removed(parent: Path) -> None:
    """Finish what a :func:`remove_tree` that was killed has left in *parent*."""
    for left in parent.glob(".gone-*"):
        shutil.rmtree(left)


def _sweep(target: Path) -> None:
    """Remove temporary files of *target* whose process was killed before it could."""
    start = f".{target.name[:80]}."
    for entry in target.parent.iterdir():
        if entry.name.startswith(start) and entry.name.endswith(".tmp"):
            pid = entry.name[len(start) :].partition(".")[0]
            if pid.isdigit() and not alive(int(pid)):
                entry.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process with this number exists."""
    import psutil

    return bool(psutil.pid_exists(pid))


def write_atomic(target: Path, content: str | bytes) -> None:
    """Write *content* (text as UTF-8 with LF) so that readers see the old file or the new one, never a part.

    Devices of characters and pipes cannot be replaced without harm: they are written to as they are.
    """
    data = content.encode() if isinstance(content, str) else content
    if _is_stream(target):
        check_result(target, stream=True)
        _pour(target, data)
        return
    with atomic(target) as temporary:
        temporary.write_bytes(data)


def check_result(target: Path, *, stream: bool = False) -> None:
    """Raises :class:`UsageError` if a result with the name *target* would replace what is no file.

    *stream*: :func:`write_atomic` will write it, so that /dev/stdout, a terminal, /dev/null or a pipe will do.
    """
    number = _descriptor(target)
    try:
        mode = target.stat().st_mode if number is None else os.fstat(number).st_mode
    except OSError as error:
        if number is not None:
            raise UsageError(f"{show(target)} is not open", why=error.strerror or "", do="name a file") from error
        return  # not there, or nothing that we can reach: writing will tell
    kind = NO_FILES.get(stat.S_IFMT(mode))
    if kind == "a folder" or (not (stream and _is_stream(target)) and (kind or number is not None)):
        raise UsageError(
            f"{show(target)} is {kind or 'an open file'}",
            why="a result takes the place of what has its name",
            do="name a file",
        )


def check_report(target: Path) -> None:
    """:func:`check_result` for a report, which is no model and no program either."""
    check_result(target, stream=True)
    if target.is_file() and (what := _precious(target)):
        raise UsageError(f"{show(target)} is {what}", why="a report would take its place", do="name another file")


def _precious(target: Path) -> str:
    """What is surely not an earlier result: a model or a program."""
    try:
        with target.open("rb") as file:
            head = file.read(4)
    except OSError:
        return ""
    return {b"GGUF": "a model", b"\x7fELF": "a program"}.get(head, "")


def _is_stream(target: Path) -> bool:
    if _descriptor(target) is not None:
        return True
    try:
        mode = target.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _descriptor(target: Path) -> int | None:
    """The number of our own open descriptor that *target* names, such as 1 of /dev/stdout."""
    at = target.absolute()
    for _ in range(40):  # as many links as Linux follows
        parent = os.path.realpath(at.parent)
        if parent in (f"/proc/{os.getpid()}/fd", "/dev/fd") and at.name.isdigit():
            return int(at.name)
        if not at.is_symlink():
            return None
        at = Path(parent) / at.readlink()
    return None


def _pour(target: Path, data: bytes) -> None:
    """Opening /dev/stdout again would write over what it has when it is a file; a pipe waits for its reader."""
    number = _descriptor(target)
    if sys.stdout is not None:
        sys.stdout.flush()
    with os.fdopen(os.open(target, os.O_WRONLY) if number is None else os.dup(number), "wb") as out:
        out.write(data)


def show(path: Path | str) -> str:
    """A path as text that can always be printed: undecodable bytes appear escaped."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
