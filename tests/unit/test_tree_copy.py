"""A granted folder as a copy: nothing of it is lost on the way in, and what comes back follows no link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from belljar.core import errors
from belljar.host import tree_copy
from belljar.host.tree_copy import CopiedTree, TreeNode

LIMIT = 10_000


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src" / "empty").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("print(1)")
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o755)
    (folder / "fixed").write_text("fixed")
    (folder / "fixed").chmod(0o444)
    (folder / "link").symlink_to("src/main.py")
    (folder / "dangling").symlink_to("/no/such/file")
    os.link(folder / "run.sh", folder / "src" / "twin.sh")
    os.utime(folder / "fixed", (1000, 1000))
    return folder


def as_it_is(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (stat.filemode(facts.st_mode), what, facts.st_nlink, facts.st_ino)
    return found


def test_a_copy_has_links_permissions_times_empty_folders_and_second_names(project: Path) -> None:
    nodes = {node.path: node for node in tree_copy.read_tree(str(project), limit=LIMIT)}
    assert nodes["src/empty"].kind == "folder"
    assert (nodes["link"].kind, nodes["link"].target) == ("link", "src/main.py")
    assert nodes["dangling"].target == "/no/such/file"
    assert (nodes["run.sh"].mode, nodes["fixed"].mode, nodes["fixed"].mtime) == (0o755, 0o444, 1000)
    assert nodes["run.sh"].twin == nodes["src/twin.sh"].twin == "run.sh"
    assert nodes["fixed"].twin == ""


def test_what_the_guest_left_alone_is_left_alone(project: Path) -> None:
    before, was = tree_copy.read_tree(str(project), limit=LIMIT), as_it_is(project)
    assert tree_copy.bring_back(before, CopiedTree(before), str(project)) == ()
    assert as_it_is(project) == was


def test_changes_come_back_as_they_were_made(project: Path) -> None:
    before = tree_copy.read_tree(str(project), limit=LIMIT)
    now = {node.path: node for node in before}
    for gone in ("dangling", "src/empty"):
        del now[gone]
    now["fixed"] = now["fixed"]._replace(content=b"changed", mtime=2000)
    now["src/main.py"] = now["src/main.py"]._replace(mode=0o600)
    now["link"] = now["link"]._replace(target="run.sh")
    now["new"] = TreeNode("new", "folder", 0o700)
    now["new/link"] = TreeNode("new/link", "link", target="../fixed")
    assert tree_copy.bring_back(before, CopiedTree(tuple(now.values())), str(project)) == ()
    after = as_it_is(project)
    assert sorted(after) == ["fixed", "link", "new", "new/link", "run.sh", "src", "src/main.py", "src/twin.sh"]
    assert after["fixed"][:2] == ("-r--r--r--", b"changed")
    assert (project / "fixed").stat().st_mtime == 2000
    assert after["src/main.py"][0] == "-rw-------"
    assert after["link"][1] == "run.sh"
    assert (after["new"][0], after["new/link"][1]) == ("drwx------", "../fixed")
    assert after["run.sh"][3] == after["src/twin.sh"][3], "still two names of one file"


def test_what_was_not_seen_is_not_taken_for_deleted(project: Path) -> None:
    before, was = tree_copy.read_tree(str(project), limit=LIMIT), as_it_is(project)
    seen = tuple(node for node in before if not node.path.startswith(("src/", "link")))
    after = CopiedTree(seen, ("src: may not be read", "link: changed while it was read"))
    assert tree_copy.bring_back(before, after, str(project)) == after.left_out
    assert as_it_is(project) == was
    tree_copy.bring_back(before, CopiedTree((), ("./: more than 5 entries",), ("",)), str(project))
    assert as_it_is(project) == was


def test_what_comes_back_is_written_through_no_link(project: Path, tmp_path: Path) -> None:
    """Neither through one that the guest left in the place of a folder, nor through one of the host."""
    outside = tmp_path / "outside"
    outside.mkdir()
    before = tree_copy.read_tree(str(project), limit=LIMIT)
    (project / "way").symlink_to(outside)
    hostile = (
        *before, TreeNode("way/planted", "file", 0o644, content=b"x"), TreeNode("trap", "link", target=str(outside)),
        TreeNode("trap/planted", "file", 0o644, content=b"x"), TreeNode("up/../../planted", "file", content=b"x"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="climbs"):
        tree_copy.bring_back(before, CopiedTree(hostile), str(project))
    tree_copy.bring_back(before, CopiedTree(hostile[:-1]), str(project))
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "planted").exists()


def test_what_cannot_be_copied_is_refused_by_name(project: Path) -> None:
    os.mkfifo(project / "src" / "queue")
    with pytest.raises(errors.PolicyDenied, match="src/queue: pipe"):
        tree_copy.read_tree(str(project), limit=LIMIT)
    (project / "src" / "queue").unlink()
    try:
        os.setxattr(project / "run.sh", "user.origin", b"here")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    with pytest.raises(errors.PolicyDenied, match=r"run.sh: has the extended attribute user.origin"):
        tree_copy.read_tree(str(project), limit=LIMIT)


def test_a_folder_over_the_limit_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 100)
    assert [node.path for node in tree_copy.read_tree(str(tmp_path), limit=100)] == ["big"]
    with pytest.raises(errors.PolicyDenied, match=r"workspace: .*raise `disk`"):
        tree_copy.read_tree(str(tmp_path), limit=99)
