"""The only way out of a sandbox that was granted hosts: a filtering proxy on the host's side.

Inside there is no route and no name service, only a listening socket on the guest's own loopback, whose other side is
here. `access` holds what a sandbox may reach now, `judgement` decides on one host and one address, `proxy` answers the
guest, `tls_hello` and `plain_http` look at what it says before it is let through, `relay` carries the bytes,
`named_sets` knows the hosts behind names such as `python-packages`, and `guest` is what a guest's programs are told.
"""
