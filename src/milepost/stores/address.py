"""The one way to cut an address at its end."""

from __future__ import annotations

from ..errors import UsageError

__all__ = ["trimmed"]


def trimmed(address: str) -> str:
    """Return the address of a store without the slashes at its end.

    Nobody else may cut them off: of ``s3://``, which is what is left of ``s3://$BUCKET`` where the
    variable is not set, that would make ``s3:``, and that is the name of a folder.

    Raises:
        UsageError: It names no bucket.
    """
    scheme, _, rest = address.partition("://")
    bucket, _, below = rest.partition("/")
    is_libcloud = scheme.lower() == "libcloud"
    container = below.partition("/")[0] if is_libcloud else bucket
    if not (bucket and container):
        usual = "provider/container" if is_libcloud else "bucket"
        raise UsageError(
            f"{address!r} names no {usual.rpartition('/')[2]}.",
            safe="Nothing was written.",
            hint=f"Write {scheme}://{usual}/prefix. Was a variable in the address empty?",
            path=address,
        )
    return address.rstrip("/")
