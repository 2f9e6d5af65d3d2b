"""The wasm worker: the trusted side of the WebAssembly wall. A program of its own, inside the native jail.

It is shipped into the jail as the package `worker` and runs on the system's Python, which may be as old as 3.9.
"""
