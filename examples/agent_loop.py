"""An agent that reads `error.suggestion` and mends its code. The "model" is scripted, the sandbox is real."""

import belljar

TASK = "How many words of the text are longer than five letters?"
TEXT = "a bell jar keeps everything inside where everyone can see it\n"

# What a model would answer to each kind of failure. A real one would be given the message and the suggestion.
ANSWERS = {
    None: "import wordtools\nprint(wordtools.count_long(open('text.txt')))",
    belljar.ErrorType.MISSING_PACKAGE: "words = open('text.txt').read.split()\nprint(sum(len(w) > 5 for w in words))",
    belljar.ErrorType.RUNTIME_ERROR: "words = open('text.txt').read().split()\nprint(sum(len(w) > 5 for w in words))",
}


def ask_model(failure: belljar.ErrorType | None, suggestion: str) -> str:
    return ANSWERS[failure]


def solve(attempts: int = 5) -> str:
    failure, suggestion = None, ""
    for attempt in range(1, attempts + 1):
        result = belljar.run(ask_model(failure, suggestion), files={"text.txt": TEXT}, timeout=10)
        if result.ok:
            print(f"attempt {attempt}: {result.status}")
            return result.stdout.strip()
        failure, suggestion = result.error.error_type, result.error.suggestion
        print(f"attempt {attempt}: {failure}: {result.error.message}")
        print(f"  suggestion: {suggestion}")
    raise SystemExit("the agent gave up")


print(TASK)
print("answer:", solve())
