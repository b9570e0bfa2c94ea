"""One wrapper around git. Everything that could change bytes is pinned; the user's configuration is not read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamafork import proc
from llamafork.errors import EnvironmentFault, PatchError, SourceError

MINIMUM = (2, 32)  # `git apply --3way --cached` works from here on
IDENTITY = BRANCH = "llamafork"
EPOCH = 1767225600  # 2026-01-01T00:00:00Z, so that commit hashes repeat everywhere

# Each option here is one that some user's configuration could change.
DIFF = (
    "--full-index",
    "--binary",
    "--no-renames",
    "--diff-algorithm=myers",
    "--unified=3",
    "--inter-hunk-context=0",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-indent-heuristic",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
CONFIG = (
    "core.autocrlf=false",
    "core.eol=lf",
    "core.safecrlf=false",
    "core.symlinks=true",
    "core.quotePath=true",
    "commit.gpgSign=false",
    "core.hooksPath=/dev/null",
    "gc.auto=0",
    "maintenance.auto=false",
    "advice.detachedHead=false",
    "core.fsmonitor=false",
    "core.abbrev=40",
    f"core.excludesFile={os.devnull}",
    f"core.attributesFile={os.devnull}",
)
# Highest precedence of all attribute files: the tree's own .gitattributes cannot bring conversion back.
ATTRIBUTES = "* -text -eol -ident -filter -working-tree-encoding !diff\n"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_TERMINAL_PROMPT="0",
        GIT_OPTIONAL_LOCKS="0",
        GIT_AUTHOR_NAME=IDENTITY,
        GIT_AUTHOR_EMAIL=f"{IDENTITY}@localhost",
        LC_ALL="C",
        TZ="UTC",
        GIT_COMMITTER_NAME=IDENTITY,
        GIT_COMMITTER_EMAIL=f"{IDENTITY}@localhost",
    )
    env.update(extra or {})
    return env


@dataclass(frozen=True)
class Git:
    """A repository: its git folder, and the work tree if it has one."""

    git_dir: Path
    work_tree: Path | None = None
    index: Path | None = None
    extra: dict[str, str] = field(default_factory=dict)

    def run(
        self, *args: str | Path, stdin: str | bytes | None = None, check: bool = True, guarded: bool = False
    ) -> proc.Result:
        head: list[str | Path] = ["git", "-c", f"safe.directory={self.work_tree or self.git_dir}"]
        for item in CONFIG:
            head += ["-c", item]
        head.append(f"--git-dir={self.git_dir}")
        if self.work_tree is not None:
            head.append(f"--work-tree={self.work_tree}")
        env = environment(self.extra | ({"GIT_INDEX_FILE": str(self.index)} if self.index else {}))
        done = proc.run([*head, *args], cwd=self.work_tree, env=env, stdin=stdin, guarded=guarded)
        if check and not done.ok:
            raise _failure(done)
        return done

    def text(self, *args: str | Path, stdin: str | bytes | None = None) -> str:
        return self.run(*args, stdin=stdin).out.strip()

    def raw(self, *args: str) -> bytes:
        """Standard output undecoded, for file contents and diffs."""
        words = ["git", *[w for c in CONFIG for w in ("-c", c)], f"--git-dir={self.git_dir}", *args]
        done = proc.run(words, env=environment(self.extra))
        if not done.ok:
            raise PatchError(f"git {args[0]} failed", why=done.err.strip())
        return done.raw

    def with_index(self, index: Path) -> Git:
        return Git(self.git_dir, self.work_tree, index, self.extra)

    def resolve(self, name: str) -> str | None:
        done = self.run("rev-parse", "--verify", "--quiet", name, check=False)
        return done.out.strip() if done.ok else None

    def tree(self, commit: str) -> str:
        return self.text("rev-parse", f"{commit}^{{tree}}")

    def commit(self, tree: str, message: str | bytes, parents: Iterable[str], order: int) -> str:
        date = f"{EPOCH + order} +0000"
        dated = Git(self.git_dir, extra={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date})
        flags = [word for parent in parents for word in ("-p", parent)]
        return dated.text("commit-tree", tree, *flags, "-F", "-", stdin=message)

    def files(self, tree: str) -> dict[str, tuple[str, str]]:
        """path → (mode, blob) of all files of a tree."""
        listing = self.raw("ls-tree", "-r", "-z", "--full-tree", tree).decode("utf-8", "surrogateescape")
        found: dict[str, tuple[str, str]] = {}
        for entry in filter(None, listing.split("\0")):
            meta, path = entry.split("\t", 1)
            mode, _, blob = meta.split(" ")
            found[path] = (mode, blob)
        return found

    def blob(self, name: str) -> bytes:
        return self.raw("cat-file", "blob", name)

    def store(self, content: bytes) -> str:
        return self.text("hash-object", "-w", "--stdin", "--no-filters", stdin=content)


def mode_of(content: bytes) -> str:
    """Modes are derived from the content, so that a source without mode bits gives the same tree."""
    return "100755" if content[:2] == b"#!" else "100644"


def init(git_dir: Path, work_tree: Path | None = None) -> Git:
    """Create (or complete) a repository; doing it again changes nothing."""
    check_version()
    git_dir.mkdir(parents=True, exist_ok=True)
    repo = Git(git_dir)
    if not (git_dir / "HEAD").is_file():
        done = proc.run(["git", "init", "-q", "--bare", f"--initial-branch={BRANCH}", git_dir], env=environment())
        if not done.ok:
            raise _failure(done)
    if work_tree is not None:
        for key, value in (("core.bare", "false"), ("core.autocrlf", "false"), ("commit.gpgsign", "false")):
            repo.run("config", key, value)
    (git_dir / "info").mkdir(exist_ok=True)
    (git_dir / "info" / "attributes").write_text(ATTRIBUTES)  # comes last: without it, the rest may be missing too
    return Git(git_dir, work_tree)


def sweep_locks(git_dir: Path, *, index: bool = True) -> None:
    """Remove lock files that a killed git left. Only for a repository whose writers our own lock keeps apart."""
    names = ["HEAD.lock", "packed-refs.lock", "config.lock", "shallow.lock", *(["index.lock"] if index else [])]
    for file in [*(git_dir / name for name in names), *(git_dir / "refs").rglob("*.lock")]:
        file.unlink(missing_ok=True)


def check_version() -> tuple[int, int]:
    done = proc.run(["git", "--version"])
    found = re.search(r"(\d+)\.(\d+)", done.out)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < MINIMUM:
        raise EnvironmentFault(
            f"git {done.out.strip()} is too old",
            why="the series needs `git apply --3way --cached`",
            do=f"install git {MINIMUM[0]}.{MINIMUM[1]} or newer",
        )
    return version


def _failure(done: proc.Result) -> Exception:
    why = (done.err or done.out).strip()
    verb = next((w for w in done.args[1:] if not w.startswith("-") and "=" not in w), "?")
    if "No space left" in why:
        return EnvironmentFault(
            f"no space left on the disk (git {verb})",
            why=why.splitlines()[-1],
            do="free some space, then run the same command again",
        )
    if "dubious ownership" in why:
        where = next((w.split("=", 1)[1] for w in done.args if w.startswith("--git-dir=")), "the folder")
        return EnvironmentFault(
            "git refuses a folder that another user owns",
            why=why.splitlines()[0],
            do=f"git config --global --add safe.directory {where}",
        )
    if verb in {"fetch", "clone", "ls-remote"}:
        return SourceError(f"git {verb} failed", why=why.splitlines()[-1] if why else "")
    return PatchError(f"git {verb} failed", why=why[-600:])
