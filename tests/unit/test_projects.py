"""Folders that a request over the network may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.core import errors
from belljar.core.request import RunRequest, Workspace
from belljar.service import projects
from belljar.service.instances import ServerInstance


def asking(path: object) -> RunRequest:
    return RunRequest(code="1", workspace=Workspace(path=str(path)))


def test_a_folder_below_a_root_is_granted_and_the_root_itself_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    projects.check(asking(tmp_path / "a"), [str(tmp_path)])
    projects.check(asking(tmp_path), [str(tmp_path)])


def test_without_roots_no_folder_is_granted(tmp_path: Path) -> None:
    with pytest.raises(errors.PolicyDenied, match="grants no folder"):
        projects.check(asking(tmp_path), [])


@pytest.mark.parametrize(
    "path", ["{root}/..", "{root}/a/../../etc", "/etc", "{root}x", "{root}/out", "{root}/none", "a"]
)
def test_a_way_out_of_the_roots_is_refused(path: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "rootx").mkdir()
    (root / "out").symlink_to("/etc")
    with pytest.raises(errors.PolicyDenied):
        projects.check(asking(path.format(root=root)), [str(root)])


def test_packages_are_folders_too(tmp_path: Path) -> None:
    with pytest.raises(errors.PolicyDenied):
        projects.check(RunRequest(code="1", packages="/usr"), [str(tmp_path)])


def test_a_server_that_let_go_of_its_lock_is_dead_and_one_that_holds_it_is_not(tmp_path: Path) -> None:
    first, second = ServerInstance(tmp_path), ServerInstance(tmp_path)
    with second, first:
        assert not second.is_dead(first.name)
        assert not second.is_dead("server-of-another-machine")
        assert not second.is_dead("../x")
    (tmp_path / "servers" / first.name).touch()  # as `kill -9` leaves it
    with second:
        assert second.is_dead(first.name)
        second.clear()
        assert not (tmp_path / "servers" / first.name).exists()


def test_what_is_checked_is_what_is_granted_whatever_a_link_says_later(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    granted = projects.check(asking(tmp_path / "link"), [str(tmp_path)]).workspace
    assert granted is not None
    assert granted.path == str(tmp_path / "a")


def test_nobody_gets_a_folder_inside_one_that_a_guest_may_write_to_now(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    grants = projects.Grants([str(tmp_path)])
    with grants.given((str(tmp_path / "a"), True)):
        with pytest.raises(errors.Busy), grants.given((str(inner), False)):
            pass
        with grants.given((str(tmp_path / "a"), False)):
            pass
    with grants.given((str(inner), False)):
        with pytest.raises(errors.Busy), grants.given((str(tmp_path / "a"), True)):
            pass
        with grants.given((str(tmp_path / "a"), False)):
            pass


def test_a_folder_that_was_moved_while_its_run_waited_is_not_granted(tmp_path: Path) -> None:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    grants = projects.Grants([str(tmp_path / "root")])
    (tmp_path / "root" / "a").rmdir()
    (tmp_path / "root" / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(errors.PolicyDenied), grants.given((str(tmp_path / "root" / "a"), False)):
        pass
