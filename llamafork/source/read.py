"""Reading an upstream tree from an archive, a folder or a git commit, as a stream of selected files."""

from __future__ import annotations

import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from llamafork.errors import SourceError
from llamafork.source.git import Git
from llamafork.source.pin import Pin

Entry = tuple[str, bytes]


def archive(path: Path, pin: Pin, subfolder: str = "") -> Iterator[Entry]:
    """Selected files of a tar or zip archive. Its root is found by the files every llama.cpp tree has."""
    try:
        if zipfile.is_zipfile(path):
            yield from _zip(path, pin, subfolder)
        else:
            yield from _tar(path, pin, subfolder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise SourceError(
            f"cannot read the archive {path}",
            why=f"{type(error).__name__}: {error}",
            do="delete it and fetch it again, or name another archive",
        ) from error


def _tar(path: Path, pin: Pin, subfolder: str) -> Iterator[Entry]:
    with tarfile.open(path) as handle:
        members = {m.name: m for m in handle.getmembers() if m.isfile() or m.issym() or m.islnk()}
        root = _root(list(members), pin, subfolder, path)
        for name in sorted(members):
            inside = _inside(name, root)
            if inside and pin.keeps(inside):
                try:
                    content = handle.extractfile(members[name])
                except KeyError:
                    content = None
                if content is not None:
                    yield inside, content.read()


def _zip(path: Path, pin: Pin, subfolder: str) -> Iterator[Entry]:
    with zipfile.ZipFile(path) as handle:
        names = [n for n in handle.namelist() if not n.endswith("/")]
        root = _root(names, pin, subfolder, path)
        for name in sorted(names):
            inside = _inside(name, root)
            if inside and pin.keeps(inside):
                yield inside, handle.read(name)


def folder(path: Path, pin: Pin) -> Iterator[Entry]:
    """Selected files of a folder; links are followed when they stay inside it."""
    base = path.resolve()
    if not base.is_dir():
        raise SourceError(f"no such folder: {path}", do="name a folder, an archive, or URL@REF")
    if not all((base / name).is_file() for name in pin.required):
        raise _not_llama(path, pin)
    for file in sorted(base.rglob("*")):
        inside = file.relative_to(base).as_posix()
        if not pin.keeps(inside) or ".git" in file.relative_to(base).parts:
            continue
        real = file.resolve()
        if base in real.parents and stat.S_ISREG(real.stat().st_mode):
            yield inside, file.read_bytes()


def commit(repo: Git, name: str, pin: Pin) -> Iterator[Entry]:
    """Selected files of a commit in *repo*; links to files of the same tree are replaced by their content."""
    files = repo.files(name)
    if not all(path in files for path in pin.required):
        raise _not_llama(name, pin)
    for path, (mode, blob) in sorted(files.items()):
        if mode == "160000" or not pin.keeps(path):
            continue
        content = repo.blob(blob)
        if mode == "120000":
            target = _normal(PurePosixPath(path).parent / content.decode("utf-8", "surrogateescape"))
            if target not in files:
                continue
            content = repo.blob(files[target][1])
        yield path, content


def _root(names: list[str], pin: Pin, subfolder: str, path: Path) -> str:
    """The prefix inside the archive that is the tree's top; shortest first."""
    present = set(names)
    anchor = pin.required[0]
    tops = sorted((n.removesuffix(anchor) for n in names if n == anchor or n.endswith("/" + anchor)), key=len)
    for top in tops:
        wanted = not subfolder or PurePosixPath(top).name == PurePosixPath(subfolder).name
        if wanted and all(top + name in present for name in pin.required):
            return top
    raise _not_llama(path, pin)


def _inside(name: str, root: str) -> str:
    if not name.startswith(root):
        return ""
    inside = name[len(root) :]
    if inside.startswith("/") or ".." in PurePosixPath(inside).parts:
        raise SourceError(f"the archive holds an unsafe path: {name!r}", do="use another archive")
    return inside


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            if parts:
                parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _not_llama(where: object, pin: Pin) -> SourceError:
    return SourceError(
        f"{where} is not a llama.cpp tree",
        why=f"it lacks one of: {', '.join(pin.required)}",
        do="name the top folder of a llama.cpp checkout, or an archive of one",
    )
