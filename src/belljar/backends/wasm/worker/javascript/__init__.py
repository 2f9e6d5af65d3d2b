"""JavaScript and TypeScript on QuickJS as WebAssembly. `driver.py` is where a run begins."""
