"""What the tests of the native backend share with those of the models."""

from __future__ import annotations

from tests.models.conftest import pair as pair
