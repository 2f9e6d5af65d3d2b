"""Previews of callers: started, found, seen in a browser, given more time and stopped."""
