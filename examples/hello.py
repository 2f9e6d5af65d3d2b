"""The smallest thing: run a snippet, look at the answer."""

import belljar

result = belljar.run("import platform; print('hello from Python', platform.python_version())")

print(result.status, result.exit_code)
print(result.stdout, end="")
print("ran on", result.backend, "with network:", result.guarantees.network)
