"""The series' verbs on a fake upstream: apply, edit, refresh, export, lint; and what may go wrong with each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from fake_upstream import MESSAGE, World

from llamafork.errors import Exit
from llamafork.source import lint, replay, series
from llamafork.source.git import Git, environment


def git(folder: Path, *words: str, check: bool = True) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], env=environment(), capture_output=True, text=True)
    if check:
        assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_apply_gives_a_plain_repository_with_one_commit_a_change(three: World) -> None:
    three.ok("patch", "apply")
    assert git(three.tree, "log", "--format=%s").splitlines() == [
        "src : what third does", "src : what second does", "src : what first does", "llama.cpp b11434"]  # fmt: skip
    assert git(three.tree, "status", "--porcelain") == ""
    assert (three.tree / "src" / "first.cpp").read_text() == "int first;\n"


def test_apply_twice_is_a_no_op(three: World) -> None:
    three.ok("patch", "apply")
    before = {f: (three.tree / f).stat().st_mtime_ns for f in three.files()}
    assert three.json("patch", "apply")["moved"] is False
    assert before == {f: (three.tree / f).stat().st_mtime_ns for f in three.files()}


def test_apply_until_stops_there(three: World) -> None:
    three.ok("patch", "apply", "--until", "first")
    assert "line_3_first" in (three.tree / "src/main.cpp").read_text()
    assert "line_30_second" not in (three.tree / "src/main.cpp").read_text()


def test_a_failing_change_leaves_the_tree_as_it_was(three: World) -> None:
    """B4: all or nothing; no .rej, no new files of the changes before the bad one."""
    three.ok("patch", "apply")
    before = three.files()
    hooks = three.repo / "patches/second/hooks.diff"
    hooks.write_text(hooks.read_text().replace(" int line_29;", " int line_twentynine;"))
    code, _, err = three.run("patch", "apply")
    assert code == Exit.PATCH
    assert "second" in err
    assert "src/main.cpp" in err
    assert three.files() == before
    assert git(three.tree, "status", "--porcelain") == ""


def test_a_failing_first_apply_makes_no_tree_to_mistake_for_a_good_one(three: World) -> None:
    three.ok("source", "clean", "--work-tree")
    hooks = three.repo / "patches/second/hooks.diff"
    hooks.write_text(hooks.read_text().replace(" int line_29;", " int gone;"))
    assert three.run("patch", "apply")[0] == Exit.PATCH
    assert not three.tree.exists()


def test_a_users_edit_is_reported_and_kept(three: World) -> None:
    """B4: a hand edit is refused, with --force it is dropped but a copy stays."""
    three.ok("patch", "apply")
    three.edit("src/other.cpp", "int other_1;", "int mine;")
    three.write(three.tree / "src/mine.cpp", "int own;\n")
    code, _, err = three.run("patch", "apply")
    assert code == Exit.PATCH
    assert "src/other.cpp" in err
    assert "src/mine.cpp" in err
    assert "int mine;" in (three.tree / "src/other.cpp").read_text()
    _, _, err = three.run("patch", "apply", "--force")
    assert "int mine;" not in (three.tree / "src/other.cpp").read_text()
    assert not (three.tree / "src/mine.cpp").exists()
    kept = list((three.tree / ".git/llamafork-rescue").rglob("other.cpp"))
    assert len(kept) == 1
    assert "int mine;" in kept[0].read_text()


def test_a_half_done_git_command_is_named_and_restored_only_by_force(three: World) -> None:
    """B3: a left-over `git am` of the user is reported with its patch; --force restores the tree."""
    three.ok("patch", "export", "--mbox", str(three.base / "mails"))
    three.ok("patch", "apply")
    mail = sorted((three.base / "mails").iterdir())[0]
    git(three.tree, "am", str(mail), check=False)  # applied already: conflicts
    assert (three.tree / ".git/rebase-apply").exists()
    code, _, err = three.run("patch", "apply")
    assert code == Exit.PATCH
    assert "rebase-apply" in err
    three.ok("patch", "apply", "--force")
    assert not (three.tree / ".git/rebase-apply").exists()
    assert git(three.tree, "status", "--porcelain") == ""


def test_a_foreign_folder_in_the_work_trees_place_is_refused(three: World) -> None:
    three.ok("source", "clean", "--work-tree")
    three.write(three.tree / "precious.txt", "mine\n")
    git(three.tree, "init", "-q")
    (three.tree / ".git/rebase-merge").mkdir()
    code, _, err = three.run("patch", "apply")
    assert code == Exit.PATCH
    assert "not made by llamafork" in err
    assert (three.tree / "precious.txt").read_text() == "mine\n"
    assert (three.tree / ".git/rebase-merge").is_dir()


def test_crlf_configuration_of_the_user_changes_nothing(three: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: the user's autocrlf, attributes and hooks have no say."""
    want = three.json("patch", "apply")["tree"]
    config = three.base / "gitconfig"
    config.write_text(
        "[core]\n\tautocrlf = true\n\teol = crlf\n[diff]\n\tnoprefix = true\n\tmnemonicPrefix = true\n"
        "[user]\n\tname = Somebody\n[commit]\n\tgpgsign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("LLAMAFORK_HOME", str(three.base / "other-home"))
    three.ok("source", "clean", "--work-tree")
    assert three.json("patch", "apply")["tree"] == want
    assert b"\r" not in (three.tree / "src/main.cpp").read_bytes()
    three.ok("patch", "export", "--check")


def test_crlf_in_hooks_is_called_line_endings(three: World) -> None:
    hooks = three.repo / "patches/second/hooks.diff"
    hooks.write_bytes(hooks.read_bytes().replace(b"\n", b"\r\n"))
    code, _, err = three.run("patch", "apply")
    assert code == Exit.PATCH
    assert "line endings" in err
    assert any("line endings" in text for _, text in lint.lint(series.load(three.repo / "patches"), None))


def test_crlf_upstream_is_another_tree(three: World) -> None:
    tree = str(three.json("source", "fetch")["tree"])
    three.pin(tree=tree)
    for file in ("src/main.cpp", "src/other.cpp"):
        at = three.upstream / file
        at.write_bytes(at.read_bytes().replace(b"\n", b"\r\n"))
    three.ok("source", "clean")
    code, _, err = three.run("source", "fetch")
    assert code == Exit.SOURCE
    assert "not the pinned tree" in err


def test_bare_blank_context_lines_are_found_and_named(three: World) -> None:
    """B1: an editor that strips trailing blanks damages a diff."""
    three.change("blank", {"src/main.cpp": ("int line_10;\n", "int line_10;\n\nint after_blank;\n")})
    three.change("next", {"src/main.cpp": ("int line_11;\n", "int line_11_next;\n")})
    hooks = three.repo / "patches/next/hooks.diff"
    assert "\n \n" in hooks.read_text()
    hooks.write_text(hooks.read_text().replace("\n \n", "\n\n"))
    findings = lint.lint(series.load(three.repo / "patches"), None)
    assert any(name == "next" and "bare blank context" in text for name, text in findings)


def test_owner_of_the_tree_does_not_matter(three: World) -> None:
    """B6: a tree that belongs to another user works, and the user's git configuration stays as it was."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give the tree to another user; run the tests as root to un-skip")
    three.ok("patch", "apply")
    subprocess.run(["chown", "-R", "12345", str(three.tree)], check=True)
    three.ok("patch", "apply")
    assert three.json("source", "status")["edited files"] == 0


def test_edit_and_refresh_touch_only_that_change(three: World) -> None:
    before = three.files(three.repo / "patches")
    three.ok("patch", "edit", "first")
    assert "line_30_second" not in (three.tree / "src/main.cpp").read_text()
    three.edit("src/main.cpp", "int line_3_first;", "int line_3_better;")
    three.ok("patch", "refresh")
    after = three.files(three.repo / "patches")
    # blob hashes in the index line of a later diff of the same file follow; its content does not
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"first/hooks.diff", "second/hooks.diff", "series.lock"}
    assert b"line_3_better" in after["first/hooks.diff"]
    assert three.ok("patch", "export", "--check")
    text = (three.tree / "src/main.cpp").read_text()
    assert "line_3_better" in text
    assert "line_30_second" in text


def test_refresh_moves_on_to_a_change_that_conflicts_and_can_be_finished(three: World) -> None:
    """B3: when a conflict is left for the user, the printed way on really works."""
    three.change("near", {"src/main.cpp": ("int line_3_first;", "int line_3_near;")})
    three.ok("patch", "edit", "first")
    three.edit("src/main.cpp", "int line_3_first;", "int line_3_changed;")
    code, _, err = three.run("patch", "refresh")
    assert code == Exit.PATCH
    assert "near" in err
    text = (three.tree / "src/main.cpp").read_text()
    assert "<<<<<<<" in text
    assert "line_3_near" in text
    code, _, err = three.run("patch", "refresh")
    assert code == Exit.PATCH
    assert "markers" in err
    kept = [x for x in text.splitlines() if not x.startswith(("<<<<<<<", "=======", ">>>>>>>", "|||||||"))]
    kept = [x for x in kept if x not in ("int line_3_changed;", "int line_3_first;")]
    (three.tree / "src/main.cpp").write_text("\n".join(kept) + "\n")
    three.ok("patch", "refresh")
    three.ok("patch", "export", "--check")
    assert "line_3_near" in (three.tree / "src/main.cpp").read_text()


def test_a_file_in_new_has_one_owner(three: World) -> None:
    three.ok("patch", "edit", "third")
    three.write(three.tree / "src/first.cpp", "int changed_by_third;\n")
    code, _, err = three.run("patch", "refresh")
    assert code == Exit.PATCH
    assert "belongs to change first" in err


def test_abort_closes_an_edit_and_keeps_a_copy(three: World) -> None:
    before = three.files(three.repo / "patches")
    three.ok("patch", "edit", "second")
    three.edit("src/main.cpp", "int line_1;", "int scratch;")
    assert three.run("patch", "apply")[0] == Exit.PATCH
    three.ok("patch", "edit", "--abort")
    assert three.files(three.repo / "patches") == before
    three.ok("patch", "apply")
    assert "scratch" not in (three.tree / "src/main.cpp").read_text()
    assert any("scratch" in f.read_text() for f in (three.tree / ".git/llamafork-rescue").rglob("main.cpp"))


def test_lock_mismatch_is_refused(three: World) -> None:
    lock = three.repo / "patches/series.lock"
    lock.write_text(lock.read_text().replace("second ", "second 0"))
    code, _, err = three.run("patch", "apply")
    assert code == Exit.PATCH
    assert "series.lock does not match at second" in err


def test_two_homes_give_the_same_hashes(three: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = three.json("patch", "apply")
    commits = git(three.tree, "rev-parse", "HEAD")
    monkeypatch.setenv("LLAMAFORK_HOME", str(three.base / "second home"))
    three.ok("source", "clean", "--work-tree")
    assert three.json("patch", "apply")["tree"] == first["tree"]
    assert git(three.tree, "rev-parse", "HEAD") == commits


def test_mails_apply_with_plain_git_am(three: World) -> None:
    tree = three.json("patch", "apply")["tree"]
    three.ok("patch", "export", "--mbox", str(three.base / "mails"))
    plain = three.base / "plain"
    git(three.base, "clone", "-q", str(three.tree), str(plain))
    git(plain, "reset", "-q", "--hard", "HEAD~3")
    git(plain, "am", *map(str, sorted((three.base / "mails").iterdir())))
    assert git(plain, "rev-parse", "HEAD^{tree}") == tree


def test_export_folder_is_the_series_itself(three: World) -> None:
    three.ok("patch", "export", "--folder", str(three.base / "out"))
    assert three.files(three.base / "out") == three.files(three.repo / "patches")


def test_export_check_finds_a_hand_made_diff(three: World) -> None:
    hooks = three.repo / "patches/third/hooks.diff"
    hooks.write_text(hooks.read_text().replace("@@ -3,7 +3,7 @@ int other_1;", "@@ -3,7 +3,7 @@"))
    code, _, err = three.run("patch", "export", "--check")
    assert code == Exit.PATCH
    assert "third/hooks.diff" in err


@pytest.mark.parametrize(
    ("file", "old", "new", "finding"),
    [
        ("second/MESSAGE", "Origin: llamafork\n", "", "Origin is missing"),
        ("second/MESSAGE", "src : what", "fix", "not `module : sentence`"),
        ("second/MESSAGE", "Default: off", "Default: maybe", "on or off"),
        ("second/MESSAGE", "Identifier: MIT", "Identifier: AGPL-3.0", "licence"),
        ("second/MESSAGE", "Credit: none", "Credit: none\nDepends: third", "does not come before"),
        ("second/hooks.diff", "+int line_30_second;", "+int line_30_second; ", "trailing blanks"),
        ("third/new/src/third.h", "int third;\n", "int third;", "does not end with a newline"),
        ("third/new/src/third.h", "int third;\n", "// no licence\n", "SPDX"),
        ("series", "third\n", "", "not in the order file"),
    ],
)
def test_lint_has_a_checker_for(three: World, file: str, old: str, new: str, finding: str) -> None:
    at = three.repo / "patches" / file
    assert old in at.read_text()
    at.write_text(at.read_text().replace(old, new))
    code, out, _ = three.run("patch", "lint")
    assert code == Exit.PATCH
    assert finding in out


@pytest.mark.parametrize(
    ("order", "word"), [("first\nfirst\n", "twice"), ("../x\n", "not a name"), ("first\nmissing\n", "missing")]
)
def test_a_broken_order_file_is_named(three: World, order: str, word: str) -> None:
    (three.repo / "patches/series").write_text(order)
    code, _, err = three.run("patch", "list")
    assert code == Exit.PATCH
    assert word in err


def test_new_upstream_by_three_way(three: World) -> None:
    """The series goes on a moved upstream by git's own merge, or stops with the change and the file."""
    other = three.base / "llama-b11500"
    for name, content in three.files(three.upstream).items():
        three.write(other / name, content.decode())
    moved = (other / "src/main.cpp").read_text()
    (other / "src/main.cpp").write_text("int new_head;\n" * 3 + moved.replace("int line_33;", "int line_33_upstream;"))
    from llamafork.source import prepare

    made = prepare.on_upstream(three.paths, str(other), None)
    assert made.base.pin.build == 11500
    text = made.repo.blob(made.repo.files(made.tip)["src/main.cpp"][1]).decode()
    assert "line_30_second" in text
    assert "line_33_upstream" in text
    (other / "src/main.cpp").write_text(moved.replace("int line_30;", "int line_30_theirs;"))
    with pytest.raises(replay.Conflict) as caught:
        prepare.on_upstream(three.paths, str(other), None)
    assert caught.value.change.name == "second"
    assert caught.value.paths == ("src/main.cpp",)


def test_a_change_round_trips_through_git(three: World) -> None:
    loaded = series.load(three.repo / "patches")
    again = [replay.to_change(Git(three.tree / ".git"), c.name, f"HEAD~{3 - n}", f"HEAD~{2 - n}", c.message)
             for n, c in enumerate(loaded.changes)]  # fmt: skip
    assert [series.files_of(c) for c in again] == [series.files_of(c) for c in loaded.changes]
    assert MESSAGE.format(name="second") == again[1].message


def test_a_users_global_ignore_file_hides_nothing(three: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(three.base / "config"))
    three.write(three.base / "config/git/ignore", "*.foo.cpp\n")
    three.write(three.base / "config/git/attributes", "* text eol=crlf\n")
    three.change("seen", {}, {"src/a.foo.cpp": "int a;\n", "src/b.cpp": "int b;\n"})
    assert set(series.load(three.repo / "patches").find("seen").new) == {"src/a.foo.cpp", "src/b.cpp"}


def test_aborting_a_change_just_begun_takes_it_out_again(three: World) -> None:
    before = three.files(three.repo / "patches")
    three.ok("patch", "edit", "--new", "thought")
    assert three.json("patch", "edit", "--abort")["closed"] == "thought"
    assert three.files(three.repo / "patches") == before
    three.ok("patch", "apply")


def test_a_lock_that_is_not_text_is_an_error(three: World) -> None:
    (three.repo / "patches/series.lock").write_bytes(b"\xff\xfe")
    code, _, err = three.run("patch", "list")
    assert code == Exit.PATCH
    assert "cannot read" in err


def test_a_failed_check_gives_one_json_object(three: World) -> None:
    hooks = three.repo / "patches/third/hooks.diff"
    hooks.write_text(hooks.read_text().replace("@@ -3,7 +3,7 @@ int other_1;", "@@ -3,7 +3,7 @@"))
    code, out, _ = three.run("patch", "export", "--check", "--json")
    assert code == Exit.PATCH
    assert "third/hooks.diff" in json.loads(out)["error"]


def test_an_export_that_was_interrupted_can_be_run_again(three: World) -> None:
    three.write(three.base / ".part-out/left", "of a killed run")
    three.ok("patch", "export", "--folder", str(three.base / "out"))
    assert three.files(three.base / "out") == three.files(three.repo / "patches")
    assert not (three.base / ".part-out").exists()


def test_export_wants_an_empty_folder(three: World) -> None:
    three.write(three.base / "out/mine.txt", "mine\n")
    for kind in ("--mbox", "--folder"):
        assert three.run("patch", "export", kind, str(three.base / "out"))[0] == Exit.USAGE
    assert three.files(three.base / "out") == {"mine.txt": b"mine\n"}


def test_an_edit_asked_for_again_is_the_same_edit(three: World) -> None:
    """As after an interruption; what was edited in it meanwhile stays."""
    first = three.json("patch", "edit", "second")
    three.edit("src/main.cpp", "int line_1;", "int mine;")
    assert three.json("patch", "edit", "second") == first
    assert "int mine;" in (three.tree / "src/main.cpp").read_text()
    assert three.run("patch", "edit", "first")[0] == Exit.PATCH


def test_status_is_said_in_words(three: World) -> None:
    said = [line.split(None, 1) for line in three.ok("source", "status").splitlines()]
    assert ["fetched", "yes"] in said
    assert ["left", "half done  nothing"] in said
    three.ok("source", "clean")
    assert ["fetched", "no"] in [line.split(None, 1) for line in three.ok("source", "status").splitlines()]
