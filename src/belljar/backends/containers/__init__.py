"""The container backends: Docker, gVisor and Podman, by the engine's API."""
