"""From the pin to a verified tree in the local object store; nothing is kept that was not checked."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamafork import console, pip, proc
from llamafork.errors import EnvironmentFault, LlamaforkError, SourceError, disk_full
from llamafork.paths import Paths, remove_tree
from llamafork.source import git, read
from llamafork.source.git import Git
from llamafork.source.pin import Pin, Source

FILE_LIMIT = 512 << 20  # bytes; no file of the selection comes near it


@dataclass(frozen=True)
class Fetched:
    """A tree in the object store: ``commit`` is its root commit, ``tree`` the git tree hash."""

    pin: Pin
    commit: str
    tree: str
    source: str


def store(paths: Paths) -> Git:
    """The object store. Call it under a lock: what a killed git left locked is freed."""
    git.sweep_locks(paths.cache / "upstream.git")
    return git.init(paths.cache / "upstream.git")


def cached(paths: Paths, pin: Pin) -> Fetched | None:
    """The pin's tree, if an earlier run brought it and it is the right one."""
    if not (paths.cache / "upstream.git" / "HEAD").is_file():
        return None
    repo = Git(paths.cache / "upstream.git")
    commit = repo.resolve(pin.ref)
    if commit is None:
        return None
    tree = repo.tree(commit)
    return Fetched(pin, commit, tree, "cache") if not pin.tree or tree == pin.tree else None


def fetch(paths: Paths, pin: Pin, *, offline: bool = False) -> Fetched:
    """Bring the pin's tree into the object store, trying its sources in order.

    Raises :class:`SourceError` that lists what each source said when none gave the pinned tree.
    """
    paths.cache.mkdir(parents=True, exist_ok=True)
    with proc.lock(paths.cache / "upstream.lock"):
        found = cached(paths, pin)
        if found is not None:
            return found
        said: list[str] = []
        for source in pin.sources:
            if offline and source.kind in {"sdist", "git"} and not _downloaded(paths, source):
                said.append(f"{source}: not in the cache, and --offline forbids the network")
                continue
            try:
                with console.step(f"fetch {source}") as step:
                    result = _take(paths, pin, source)
                    step.note = f"tree {result.tree[:12]}"
                return result
            except LlamaforkError as error:
                if isinstance(error, EnvironmentFault):
                    raise
                said.append(f"{source}: {error.what}" + (f" ({error.why})" if error.why else ""))
                console.warn(said[-1])
    raise SourceError(
        f"no source gave upstream {pin.version}",
        why="; ".join(said),
        do="check the network or the proxy, or give a local copy: llamafork source fetch --from ARCHIVE_OR_FOLDER",
    )


def _take(paths: Paths, pin: Pin, source: Source) -> Fetched:
    repo = store(paths)
    if source.kind == "sdist":
        entries = read.archive(download(paths, source), pin, source.subfolder)
    elif source.kind == "git":
        entries = _git_entries(repo, pin, source)
    elif source.kind == "archive":
        path = Path(source.path).expanduser()
        if source.sha256:
            verify(path, source.sha256)
        entries = read.archive(path, pin, source.subfolder)
    elif source.kind == "folder":
        entries = read.folder(Path(source.path).expanduser(), pin)
    else:
        raise SourceError(f"unknown kind of source: {source.kind}", do="use sdist, git, archive or folder")
    return _import(repo, pin, entries, str(source))


def _git_entries(repo: Git, pin: Pin, source: Source) -> Iterator[read.Entry]:
    if source.ref.startswith("-") or source.url.startswith("-"):
        raise SourceError("a URL or a ref cannot begin with '-'", do="write URL@REF")
    wanted = f"{source.ref}:refs/fetched/{pin.version}"
    repo.run("fetch", "--depth", "1", "--no-tags", "--force", source.url, wanted, guarded=True)
    yield from read.commit(repo, f"refs/fetched/{pin.version}", pin)


def _import(repo: Git, pin: Pin, entries: Iterator[read.Entry], label: str) -> Fetched:
    """Write *entries* as one root commit with git fast-import: a pack appears whole or not at all."""
    scratch = "refs/importing/tree"
    for left in (repo.git_dir / "objects" / "pack").glob("tmp_*"):
        left.unlink(missing_ok=True)
    message = f"llama.cpp {pin.version}\n".encode()
    who = f"{git.IDENTITY} <{git.IDENTITY}@localhost> {git.EPOCH} +0000".encode()
    command = ["git", f"--git-dir={repo.git_dir}", "fast-import", "--quiet", "--force", "--done"]
    worker = subprocess.Popen(
        command,
        env=git.environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=proc.shared_fds(),
    )
    assert worker.stdin is not None
    assert worker.stderr is not None
    count = 0
    try:
        worker.stdin.write(b"commit %s\ncommitter %s\ndata %d\n%s\n" % (scratch.encode(), who, len(message), message))
        for path, content in entries:
            if len(content) > FILE_LIMIT:
                raise SourceError(f"{path} is {len(content)} bytes; not a llama.cpp tree")
            quoted = '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
            worker.stdin.write(
                b"M %s inline %s\ndata %d\n"
                % (git.mode_of(content).encode(), quoted.encode("utf-8", "surrogateescape"), len(content))
            )
            worker.stdin.write(content + b"\n")
            count += 1
        worker.stdin.write(b"\ndone\n")
        worker.stdin.close()
        errors = worker.stderr.read().decode("utf-8", "replace")
        if worker.wait() != 0:
            raise OSError(errors.strip())
    except OSError as error:
        # a worker that died first leaves us a broken pipe: its own words are the cause
        said = worker.stderr.read().decode("utf-8", "replace") if isinstance(error, BrokenPipeError) else ""
        worker.kill()
        text = said or str(error)
        if "No space left" in text or getattr(error, "errno", None) == 28:
            raise disk_full(repo.git_dir, error) from error
        raise SourceError("cannot store the upstream tree", why=text[-300:]) from error
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
        for crash in repo.git_dir.glob("fast_import_crash_*"):
            crash.unlink(missing_ok=True)
    return _accept(repo, pin, scratch, label, count)


def _accept(repo: Git, pin: Pin, scratch: str, label: str, count: int) -> Fetched:
    commit, tree = repo.text("rev-parse", scratch), repo.tree(scratch)
    repo.run("update-ref", "-d", scratch)
    if pin.tree and tree != pin.tree:
        raise SourceError(
            f"{label} is not the pinned tree",
            why=f"tree {tree}, the pin says {pin.tree} ({count} files)",
            do="use an unmodified source, or --upstream to build against a tree of your own",
        )
    repo.run("update-ref", pin.ref, commit)
    return Fetched(pin, commit, tree, label)


def download(paths: Paths, source: Source) -> Path:
    """The sdist's file from the cache, or by pip, whose own index, proxy and wheel folder settings apply."""
    kept = _downloaded(paths, source)
    if kept is not None:
        return kept
    folder = paths.cache / "downloads" / source.sha256
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".part-*"):  # of a run that was killed; the lock says that none is running
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as temporary:
        requirement = Path(temporary) / "requirement.txt"
        requirement.write_text(f"{source.name}=={source.version} --hash=sha256:{source.sha256}\n")
        done = pip.download(Path(temporary), "--no-binary", source.name, "--require-hashes", "-r", requirement)
        if not done.ok:
            raise explain_pip(done.out + done.err, source)
        files = list(Path(temporary).glob("*.tar.gz"))
        if not files:
            raise SourceError("pip downloaded no archive", why=done.out[-200:])
        verify(files[0], source.sha256)
        target = folder / files[0].name
        files[0].replace(target)
    return target


def _downloaded(paths: Paths, source: Source) -> Path | None:
    """A cached download whose hash is right; a damaged one is removed."""
    if not source.sha256:
        return None
    for file in sorted((paths.cache / "downloads" / source.sha256).glob("*")):
        try:
            verify(file, source.sha256)
            return file
        except SourceError:
            console.warn(f"{file.name} in the cache is damaged; fetching it again")
            file.unlink(missing_ok=True)
    return None


def verify(path: Path, sha256: str) -> None:
    """Raise :class:`SourceError` unless the file's sha256 is the one given."""
    try:
        with path.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"cannot read {path}", why=str(error)) from error
    if found != sha256:
        raise SourceError(
            f"{path.name} has the wrong hash",
            why=f"sha256 {found}, expected {sha256}",
            do="fetch it again from a source you trust; nothing of it was used",
        )


def explain_pip(text: str, source: Source) -> LlamaforkError:
    """What pip's output means for the user."""
    last = next((x for x in reversed(text.strip().splitlines()) if "error" in x.lower()), text.strip()[-200:])
    if "DO NOT MATCH THE HASHES" in text:
        return SourceError(
            f"{source.name} {source.version} has the wrong hash",
            why="the index serves another file than the one pinned",
            do="check your package index or mirror; nothing of it was used",
        )
    if "No space left" in text:
        return EnvironmentFault(
            "no space left while downloading upstream",
            why=last,
            do="free some space, or set LLAMAFORK_HOME and TMPDIR to a larger disk",
        )
    if "No module named pip" in text:
        return SourceError("this Python has no pip", why=last, do=f"{sys.executable} -m ensurepip")
    if any(
        word in text
        for word in (
            "NewConnectionError",
            "Name or service",
            "ConnectTimeout",
            "ProxyError",
            "Network is unreachable",
            "Max retries",
            "Connection refused",
        )
    ):
        return SourceError(
            "no network, or the package index does not answer",
            why=last,
            do="check the network and the proxy settings, or use --from with a local copy",
        )
    return SourceError(
        f"pip could not download {source.name} {source.version}",
        why=last,
        do="run with -v to see pip's command, or use --from with a local copy",
    )


def local(paths: Paths, pin: Pin, where: Path) -> Fetched:
    """The pinned tree from a local archive or folder."""
    kind = "folder" if where.is_dir() else "archive"
    if not where.exists():
        raise SourceError(f"no such file or folder: {where}", do="name an archive or a folder")
    paths.cache.mkdir(parents=True, exist_ok=True)
    with proc.lock(paths.cache / "upstream.lock"):  # read and compared also when the tree is there already
        return _take(paths, pin, Source(kind, path=str(where)))


def clean(paths: Paths) -> list[Path]:
    """Remove downloads and the object store; finished builds stay."""
    gone = [p for p in (paths.cache / "downloads", paths.cache / "upstream.git") if p.exists()]
    for path in gone:
        remove_tree(path)
    sweep_removed(paths.cache)
    return gone


def sweep_removed(folder: Path) -> None:
    """Finish what an interrupted removal left beside its place."""
    for left in folder.glob(".gone-*"):
        shutil.rmtree(left)
