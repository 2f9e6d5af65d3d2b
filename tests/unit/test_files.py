"""What leaves a box is hostile: links, pipes, devices, depth, size and names are tried here on real trees."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from belljar.core import errors
from belljar.core.result import File
from belljar.host import box_files, files

patient = trials(deadline=None)  # a machine that is busy with other things is not a failure


@pytest.fixture
def box(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder as a box would have it, and its open descriptor; secrets lie beside it."""
    folder = tmp_path / "box"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield folder, root
    os.close(root)


def collected(root: int, *patterns: str) -> dict[str, bytes]:
    return {file.path: file.content for file in files.collect(root, patterns or ("**",)).files}


# --- out of the box ---


def test_regular_files_come_back_with_their_content_and_mode(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c.bin").write_bytes(b"\x00\xff")
    (folder / "run").write_text("x")
    (folder / "run").chmod(0o755)
    found = files.collect(root, ["**"])
    assert found == (
        (File(path="a/b/c.bin", content=b"\x00\xff"), File(path="run", content=b"x", executable=True)),
        (),
    )


def test_a_link_is_left_out_whether_it_points_out_in_or_nowhere(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "real").write_text("real")
    for name, target in (
        ("out", "../secret.txt"),
        ("etc", "/etc/passwd"),
        ("in", "real"),
        ("none", "nothing"),
        ("up", ".."),
    ):
        os.symlink(target, folder / name)
    found = files.collect(root, ["**"])
    assert [file.path for file in found.files] == ["real"]
    assert sorted(reason.split(":")[0] for reason in found.left_out) == ["etc", "in", "none", "out", "up"]
    assert all("link, only regular files leave a sandbox" in reason for reason in found.left_out)


def test_a_linked_folder_is_not_walked(box: tuple[Path, int]) -> None:
    folder, root = box
    os.symlink("..", folder / "up")
    os.symlink("/etc", folder / "etc")
    assert collected(root, "**/*") == {}
    assert {entry.path: entry.kind for entry in files.entries(root)} == {"up": "link", "etc": "link"}


def test_pipes_sockets_and_devices_are_named_and_never_opened(box: tuple[Path, int]) -> None:
    folder, root = box
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        where = os.getcwd()
        os.chdir(folder)  # the path of a socket must be short
        try:
            server.bind("socket")
        finally:
            os.chdir(where)
        found = files.collect(root, ["**"])
    assert found.files == ()
    assert [reason.split(",")[0] for reason in found.left_out] == ["pipe: pipe", "socket: device or socket"]


def test_a_file_swapped_for_a_link_or_a_pipe_between_look_and_read_is_not_followed(
    box: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = box
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    read = files.read_node

    def swap_then_read(node: files.Node, limit: int) -> bytes | str:
        (folder / node.name).unlink()
        if node.name == "a":
            os.symlink("../secret.txt", folder / "a")
        else:
            os.mkfifo(folder / "b")
        return read(node, limit)

    monkeypatch.setattr(files, "read_node", swap_then_read)
    assert files.collect(root, ["**"]) == ((), ("a: changed while it was read", "b: changed while it was read"))


def test_a_folder_swapped_for_a_link_while_it_is_walked_never_yields_what_is_outside(box: tuple[Path, int]) -> None:
    folder, root = box
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "x").write_text("secret")
    (folder / "d").mkdir()
    (folder / "d" / "x").write_text("inside")
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            os.rename(folder / "d", folder / "kept")
            os.symlink(outside, folder / "d")
            os.unlink(folder / "d")
            os.rename(folder / "kept", folder / "d")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        seen = {content for _ in range(300) for content in collected(root).values()}
    finally:
        done.set()
        swapper.join()
    assert seen <= {b"inside"}


def test_what_goes_over_the_budget_for_all_files_is_left_out(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "small").write_bytes(b"x" * 6)
    (folder / "tall").write_bytes(b"x" * 6)
    found = files.collect(root, ["**"], limit=10)
    assert [file.path for file in found.files] == ["small"]
    assert found.left_out == ("tall: 6 bytes is over what may be collected",)


def test_a_sparse_giant_is_left_out_without_being_read(box: tuple[Path, int]) -> None:
    folder, root = box
    with (folder / "giant").open("wb") as file:
        file.truncate(1 << 40)
    found = files.collect(root, ["**"])
    assert found.files == () and "1T is over" in found.left_out[0]


def test_a_tree_of_a_hundred_folders_deep_is_walked_to_the_cap_and_no_further(box: tuple[Path, int]) -> None:
    folder, root = box
    where = os.getcwd()
    os.chdir(folder)
    try:
        for depth in range(100):
            Path(f"f{depth}").write_text("x")
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.chdir(where)
    paths = collected(root)
    assert len(paths) == files.MAX_DEPTH
    assert max(path.count("/") for path in paths) == files.MAX_DEPTH - 1


def test_more_entries_than_the_cap_are_not_looked_at_and_that_is_told(box: tuple[Path, int]) -> None:
    folder, root = box
    for number in range(9):
        (folder / f"f{number}").touch()
    found = files.collect(root, ["**"], most=5)
    assert len(found.files) == 5
    assert found.left_out == ("./: more than 5 entries, the rest was not looked at",)


def test_names_that_could_harm_a_terminal_or_a_path_are_left_out_and_shown_escaped(box: tuple[Path, int]) -> None:
    folder, root = box
    for name in (b"\x1b[31mred", b"new\nline", b"back\\slash", b"\xff\xfe"):
        with open(os.path.join(os.fsencode(folder), name), "wb"):
            pass
    (folder / ("x" * 255)).touch()
    found = files.collect(root, ["**"])
    assert [file.path for file in found.files] == ["x" * 255]
    assert len(found.left_out) == 4
    assert all(reason.isprintable() and "an unusable name" in reason for reason in found.left_out)


def test_a_folder_that_cannot_be_opened_is_named(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "closed").mkdir(mode=0)
    folder.chmod(0o755)
    with files.acting_as(65534 if os.geteuid() == 0 else None):  # root opens every folder
        assert files.collect(root, ["**"]).left_out == ("closed: cannot be opened",)


def test_a_write_over_a_file_of_several_names_leaves_it_one_file(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "one").write_text("the longer text that was there")
    (folder / "one").chmod(0o640)
    os.link(folder / "one", folder / "other")
    box_files.put(root, [File(path="one", content=b"new")])
    assert (folder / "other").read_bytes() == b"new"
    assert (folder / "one").samefile(folder / "other")
    assert stat.S_IMODE((folder / "one").stat().st_mode) == 0o640
    box_files.put(root, [File(path="other", content=b"", executable=True)])
    assert (folder / "one").read_bytes() == b""
    assert stat.S_IMODE((folder / "one").stat().st_mode) == 0o750
    (folder / "other").unlink()
    before = (folder / "one").stat().st_ino
    box_files.put(root, [File(path="one", content=b"whole")])  # of one name: whole, or not at all
    assert (folder / "one").stat().st_ino != before
    assert os.listdir(folder) == ["one"]


def test_a_list_that_would_not_be_whole_is_refused(box: tuple[Path, int]) -> None:
    folder, root = box
    for number in range(6):
        (folder / str(number)).touch()
    assert len(files.entries(root, most=6)) == 6
    with pytest.raises(errors.PolicyDenied, match=r"list: there are more than 5 entries in /workspace.*find"):
        files.entries(root, most=5)


def test_entries_are_listed_in_order_with_kind_and_size(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "d").mkdir()
    (folder / "d" / "f").write_text("123")
    os.mkfifo(folder / "p")
    kinds = [(entry.path, entry.kind) for entry in files.entries(root)]
    assert kinds == [("d", "folder"), ("d/f", "file"), ("p", "pipe")]
    assert files.entries(root)[1].size == 3


# --- patterns ---


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("out.txt", ["out.txt", "a/out.txt", "a/b/out.txt"], ["out.txt2", "xout.txt", "out.txt/a"]),
        ("./out.txt", ["out.txt"], ["a/out.txt"]),
        ("*.png", ["a.png", "x/y.png"], ["a.pngx", "png"]),
        ("a/*", ["a/b"], ["a", "a/b/c", "x/a/b"]),
        ("a/**", ["a/b", "a/b/c"], ["b/a", "ab"]),
        ("**/x", ["x", "a/x", "a/b/x"], ["xx"]),
        ("a/**/z", ["a/z", "a/b/c/z"], ["z", "a/zz"]),
        ("[ab].txt", ["a.txt", "d/b.txt"], ["c.txt"]),
        ("?.txt", ["a.txt"], ["ab.txt", ".txt"]),
        ("A.txt", ["A.txt"], ["a.txt"]),
    ],
)  # fmt: skip
def test_a_pattern_matches_what_its_words_say(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in yes + no if files.matches(path, [pattern])] == yes


@patient
@given(st.lists(st.sampled_from(["a", "b", "*", "**", "?", "[", "]"]), min_size=1, max_size=6).map("/".join))
def test_any_pattern_is_decided(pattern: str) -> None:
    assert files.matches("a/b/a", [pattern]) in (True, False)


def test_no_pattern_takes_long_to_decide() -> None:
    path = "/".join(["a"] * 32)
    assert not files.matches(path, ["/".join(["**", "a"] * 15 + ["b"])])


# --- into the box ---


def test_files_are_written_with_folders_and_mode_and_replace_what_was_there(box: tuple[Path, int]) -> None:
    folder, root = box
    files.write(root, [File(path="a/b/c", content=b"1"), File(path="run", content=b"2", executable=True)])
    files.write(root, [File(path="a/b/c", content=b"3")])
    assert (folder / "a" / "b" / "c").read_bytes() == b"3"
    assert stat.S_IMODE((folder / "run").stat().st_mode) & 0o111


def test_writing_replaces_a_link_and_never_what_it_points_to(box: tuple[Path, int]) -> None:
    folder, root = box
    os.symlink("../secret.txt", folder / "trap")
    files.write(root, [File(path="trap", content=b"mine")])
    assert (folder.parent / "secret.txt").read_text() == "secret"
    assert not (folder / "trap").is_symlink() and (folder / "trap").read_bytes() == b"mine"


def test_writing_through_a_linked_folder_is_refused(box: tuple[Path, int]) -> None:
    folder, root = box
    os.symlink("..", folder / "up")
    with pytest.raises((errors.InvalidRequest, OSError)):
        files.write(root, [File(path="up/planted", content=b"x")])
    assert not (folder.parent / "planted").exists()


def test_writing_below_a_file_is_refused_naming_the_path(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "file").touch()
    with pytest.raises(errors.InvalidRequest, match=r"path: 'file' is not a folder"):
        files.write(root, [File(path="file/x")])


@patient
@given(st.text(max_size=40))
def test_no_name_writes_outside(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    outer = tmp_path_factory.mktemp("outer")
    (outer / "box").mkdir()
    root = os.open(outer / "box", os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.write(root, [File(path=name, content=b"x")])
    except (ValueError, OSError) as error:
        assert str(error)
    finally:
        os.close(root)
    assert [path.name for path in outer.iterdir()] == ["box"]


def test_what_is_in_the_way_of_a_file_is_cleared_and_never_what_it_points_to(box: tuple[Path, int]) -> None:
    folder, root = box
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "x").write_text("kept")
    os.symlink("../secret.txt", folder / "trap")
    os.symlink(outside, folder / "linked")
    os.mkfifo(folder / "pipe")
    (folder / "file").write_text("in the way of a folder")
    (folder / "good").write_text("kept")
    files.clear(root, ["trap", "linked/x", "pipe", "file/x", "good", "never", "no/such/file"])
    assert [path.name for path in folder.iterdir()] == ["good"]
    assert (folder.parent / "secret.txt").exists() and (outside / "x").exists()


def test_what_was_missing_and_then_made_is_discarded_and_nothing_else(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "kept").mkdir()
    (folder / "kept" / "old").touch()
    missing = files.missing(root, ["a/b/c", "kept/new", "kept/old"])
    assert sorted(missing) == ["a", "a/b", "a/b/c", "kept/new"] and missing[0] == "a/b/c"
    files.write(root, [File(path="a/b/c"), File(path="kept/new")])
    files.discard(root, missing)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["kept", "kept/old"]
    files.discard(root, missing)


def test_a_folder_is_made_and_not_through_a_link(box: tuple[Path, int]) -> None:
    folder, root = box
    files.make_folder(root, "a/b")
    assert (folder / "a" / "b").is_dir()
    os.symlink("..", folder / "up")
    with pytest.raises((errors.InvalidRequest, OSError)):
        files.make_folder(root, "up/planted")
    assert not (folder.parent / "planted").exists()


def test_no_descriptor_is_left_open(box: tuple[Path, int]) -> None:
    folder, root = box
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "c").touch()
    os.symlink("/", folder / "link")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        files.collect(root, ["**"])
        files.write(root, [File(path="x/y/z", content=b"1")])
        with pytest.raises((errors.InvalidRequest, OSError)):
            files.write(root, [File(path="link/z", content=b"1")])
    assert len(os.listdir("/proc/self/fd")) < before + 20  # one for each round would be a leak; others come and go
