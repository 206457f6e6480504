"""Finding out whether a bucket refuses to create what is there already, before it matters."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from ..errors import AccessError, ExistsError

__all__ = ["refuses_existing"]

_log = logging.getLogger("milepost")


def refuses_existing(
    create: Callable[[str, bytes], None], delete: Callable[[str], None], *, url: str
) -> bool:
    """Create two objects under one random name; return whether the second was refused.

    Args:
        create: Creates an object on the condition that there is none.
        delete: Removes it.
        url: The place, for messages.
    """
    key = f"probe-{secrets.token_hex(8)}"
    create(key, b"first")
    try:
        create(key, b"second")
    except ExistsError:
        return True
    else:
        return False
    finally:
        try:
            delete(key)
        except AccessError as error:
            _log.warning(
                "%s/%s stays: nothing can be deleted there, so nothing can be pruned either. %s",
                url,
                key,
                error,
            )
