"""The wasm backend: CPython and QuickJS as WebAssembly."""
