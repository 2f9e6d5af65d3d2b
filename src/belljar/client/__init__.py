"""`belljar.Client`: the library's calls over HTTP."""
