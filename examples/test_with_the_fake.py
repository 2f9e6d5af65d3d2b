"""How to test an agent without a sandbox: the fake plays the guests, and everything around them is real.

Run it as it is, or with pytest.
"""

import belljar
from belljar import Result, Status
from belljar.backends.base import Backend
from belljar.backends.fake import Fake, FakeProcess


def largest(path: str, *, backend: str | Backend = "auto") -> Result:
    """The code under test: your agent's tool, with the backend as an argument."""
    return belljar.run(f"print(max(map(int, open({path!r}))))", files={path: "3\n9\n4\n"}, backend=backend, timeout=0.5)


CODE = "print(max(map(int, open('n.txt'))))"


async def finds_nine(guest: FakeProcess) -> None:
    assert guest.read("n.txt") == b"3\n9\n4\n"  # the file that the agent passed is really there
    await guest.out("9\n")


async def hangs(guest: FakeProcess) -> None:
    await guest.out("thinking\n")
    await guest.sleep(3600)


def eats_memory(guest: FakeProcess) -> None:
    guest.allocate(guest.limits.memory + 1)


def test_the_answer_is_read_from_stdout() -> None:
    assert largest("n.txt", backend=Fake({CODE: finds_nine})).stdout == "9\n"


def test_a_guest_that_hangs_is_a_timeout_with_its_partial_output() -> None:
    result = largest("n.txt", backend=Fake({CODE: hangs}))
    assert (result.status, result.stdout) == (Status.TIMEOUT, "thinking\n")


def test_a_guest_over_its_memory_is_told_apart() -> None:
    result = largest("n.txt", backend=Fake({CODE: eats_memory}))
    assert result.status is Status.OOM_KILLED
    assert result.error is not None


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed:", name.removeprefix("test_").replace("_", " "))
