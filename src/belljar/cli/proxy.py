"""`belljar socket-proxy`: the socket proxy is a program of its own, and this is its command."""

from belljar.socket_proxy.command import socket_proxy

__all__ = ["socket_proxy"]
