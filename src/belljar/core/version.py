"""The version of this installation, for every room: lower ones must not import the package's public names."""

__version__ = "0.1.0"
