"""Living sandboxes of a server: the library's handles over HTTP."""
