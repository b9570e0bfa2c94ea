"""The real series on the real pin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from real_builds import ROOT, llamafork

from llamafork.source import lint, series
from llamafork.source.git import environment


def test_the_series_has_no_findings() -> None:
    assert lint.lint(series.load(ROOT / "patches"), ROOT) == []


def test_it_round_trips_byte_for_byte() -> None:
    assert "round-trip" in llamafork("patch", "export", "--check").stdout


def test_another_home_gives_the_trees_of_the_lock(tmp_path: Path) -> None:
    """The upstream is read from this machine's downloads, so that the test costs seconds."""
    lock = series.read_lock(ROOT / "patches/series.lock")
    llamafork("source", "fetch")
    for name in ("one", "two"):
        env = {"LLAMAFORK_HOME": str(tmp_path / name), "LLAMAFORK_REPO": str(_copy(tmp_path / f"{name} repo"))}
        archive = _archive()
        if archive is not None:
            llamafork("source", "fetch", "--from", str(archive), env=env)
        done = json.loads(llamafork("patch", "apply", "--json", env=env).stdout)
        assert done["tree"] == list(lock.values())[-1]


def test_plain_git_am_gives_the_same_tree(tmp_path: Path) -> None:
    llamafork("patch", "export", "--mbox", str(tmp_path / "mails"))
    repo = tmp_path / "pin.git"
    env = {"LLAMAFORK_REPO": str(_copy(tmp_path / "repo"))}
    tree = json.loads(llamafork("patch", "apply", "--json", env=env).stdout)["tree"]
    work = tmp_path / "repo/vendor/llama.cpp"
    git = environment()
    subprocess.run(["git", "clone", "-q", str(work), str(repo)], check=True, env=git)
    mails = sorted((tmp_path / "mails").iterdir())
    subprocess.run(["git", "-C", str(repo), "reset", "-q", "--hard", f"HEAD~{len(mails)}"], check=True, env=git)
    subprocess.run(["git", "-C", str(repo), "am", "-q", *mails], check=True, env=git)
    made = subprocess.run(["git", "-C", str(repo), "rev-parse", "HEAD^{tree}"], capture_output=True, text=True, env=git)
    assert made.stdout.strip() == tree


def _copy(target: Path) -> Path:
    import shutil

    shutil.copytree(ROOT / "patches", target / "patches")
    (target / "vendor").mkdir()
    shutil.copy(ROOT / "vendor/upstream.toml", target / "vendor/upstream.toml")
    return target


def _archive() -> Path | None:
    from llamafork import paths
    from llamafork.source import pin

    sha = next(s.sha256 for s in pin.load(ROOT / "vendor/upstream.toml").sources if s.kind == "sdist")
    return next(iter((paths.find().cache / "downloads" / sha).glob("*.tar.gz")), None)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from llamafork import cli; cli.parser().format_help(); print(sorted(set(sys.modules) & "
        "{'numpy', 'gguf', 'rich', 'requests', 'psutil'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
