"""Where the processes of fault tests are born: once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made
