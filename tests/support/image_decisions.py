"""What tests of decisions about images share: three digests, facts of an image, and a refusal by its rule."""

from __future__ import annotations

from typing import Any

import pytest

from belljar.core import errors
from belljar.images.references import ImageFacts

D1, D2, D3 = (f"sha256:{digit * 64}" for digit in "123")


def facts(**changes: Any) -> ImageFacts:
    return ImageFacts(**{"reference": "app:1", "id": D1, "digest": D2, **changes})


def refused(rule: str, function: Any, *args: Any, **options: Any) -> errors.ImageRefused:
    with pytest.raises(errors.ImageRefused) as caught:
        function(*args, **options)
    assert caught.value.context["rule"] == rule
    assert (caught.value.kind, caught.value.exit_code) == ("policy_denied", 126)
    return caught.value
