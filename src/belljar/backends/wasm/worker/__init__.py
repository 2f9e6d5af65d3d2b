"""The wasm worker: the trusted side of the WebAssembly wall. A program of its own, inside the native jail."""
