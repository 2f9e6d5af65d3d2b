"""Output while it is printed, and a run that is stopped half-way. The partial output is still yours."""

import anyio

import belljar

COUNTER = """
import time
for n in range(1_000_000):
    print("tick", n)
    time.sleep(0.01)
"""


async def main() -> None:
    seen = ""
    async with belljar.astream(COUNTER) as run:
        async for event in run:
            if event.kind == "stdout":  # as much as there was to read: a part of a line, or several
                seen += event.text
                print(event.text, end="", flush=True)
            if "tick 3\n" in seen:
                run.cancel()  # ends the guest and everything it started; nothing that was printed is lost

    assert run.result.stdout == seen
    print("the run was", run.result.status)


anyio.run(main)
