"""The image of the service: what is in it, and what it does alone. Compose brings it up in `test_compose`."""

from __future__ import annotations

import pytest

from service_image import SERVICE, host

pytestmark = [pytest.mark.engine, pytest.mark.containers, pytest.mark.exhaustive("the image of the service is built")]
ALONE = ["--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]


def test_the_image_has_no_root_no_package_manager_and_nothing_setuid() -> None:
    look = (
        "id -u; for name in pip pip3 apt dpkg gcc cc make; do command -v $name; done; "
        "find / -xdev -perm /6000 -type f 2>/dev/null; touch /opt/x 2>/dev/null && echo writable; echo end"
    )
    said = host().docker("run", *ALONE, "--entrypoint", "sh", SERVICE, "-c", look)
    assert said.splitlines() == ["10001", "end"]


def test_it_refuses_to_listen_to_everybody_before_there_is_a_key() -> None:
    said = host().docker("run", *ALONE, "--tmpfs", "/tmp", SERVICE, "serve", check=False)
    assert "serves on" not in said
