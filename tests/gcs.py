"""A small service that speaks the XML interface of Google Cloud Storage, from its description.

What is kept is kept in memory. It refuses what the service refuses: requests without the token, a
condition that does not hold, parts that are too small or that it was not given, too long a page.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

TOKEN = "token-that-must-not-be-seen"
_MAX_KEYS = 1000
_MIN_PART_BYTES = 5 * 1024 * 1024

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


@dataclass(frozen=True)
class _Object:
    data: bytes
    generation: int
    modified: datetime
    metadata: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


@dataclass
class _Upload:
    key: str
    metadata: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class _RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class FakeGcs:
    """The buckets, and what is done to them. One lock: every request happens at one moment."""

    def __init__(self, bucket: str) -> None:
        self.lock = threading.Lock()
        self.bucket = bucket
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, _Upload] = {}
        self.numbers = itertools.count(1)

    def check_bucket(self, name: str) -> None:
        if name != self.bucket:
            raise _RefusedError(404, "NoSuchBucket")

    def create(self, key: str, data: bytes, headers: dict[str, str]) -> _Object:
        """Create or replace an object, if the condition holds."""
        wanted, now = headers.get("x-goog-if-generation-match"), self.objects.get(key)
        if wanted is not None and int(wanted) != (now.generation if now else 0):
            raise _RefusedError(412, "PreconditionFailed")
        metadata = {k: v for k, v in headers.items() if k.startswith("x-goog-meta-")}
        if "content-type" in headers:
            metadata["content-type"] = headers["content-type"]
        made = _Object(data, next(self.numbers), datetime.now(timezone.utc), metadata)
        self.objects[key] = made
        return made

    def get(self, key: str) -> _Object:
        if key not in self.objects:
            raise _RefusedError(404, "NoSuchKey")
        return self.objects[key]

    def complete(self, upload_id: str, body: bytes, headers: dict[str, str]) -> _Object:
        upload = self._upload(upload_id)
        listed = []
        for part in ElementTree.fromstring(body):
            fields = {one.tag.rpartition("}")[2]: (one.text or "") for one in part}
            number = int(fields["PartNumber"])
            data = upload.parts.get(number)
            if data is None or _etag(data).strip('"') != fields["ETag"].strip('"'):
                raise _RefusedError(400, "InvalidPart")
            listed.append((number, data))
        if not listed or listed != sorted(listed, key=lambda one: one[0]):
            raise _RefusedError(400, "InvalidPartOrder")
        if any(len(data) < _MIN_PART_BYTES for _, data in listed[:-1]):
            raise _RefusedError(400, "EntityTooSmall")
        made = self.create(
            upload.key, b"".join(data for _, data in listed), {**headers, **upload.metadata}
        )
        del self.uploads[upload_id]
        return made

    def _upload(self, upload_id: str) -> _Upload:
        if upload_id not in self.uploads:
            raise _RefusedError(404, "NoSuchUpload")
        return self.uploads[upload_id]

    def page(self, query: dict[str, str]) -> str:
        """Return a page of a listing."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = base64.urlsafe_b64decode(query.get("continuation-token", "")).decode()
        after = max(after, query.get("start-after", ""))
        limit = min(int(query.get("max-keys", _MAX_KEYS)), _MAX_KEYS)
        rows: dict[str, str] = {}
        last = ""
        for key in sorted(one for one in self.objects if one.startswith(prefix)):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = f"{prefix}{head}{delimiter}" if found else key
            if name <= after or (name in rows):
                continue
            if len(rows) == limit:
                break
            rows[name] = _prefix_row(name) if found else _row(key, self.objects[key])
            last = name
        else:
            last = ""
        token = base64.urlsafe_b64encode(last.encode()).decode()
        more = f"<NextContinuationToken>{token}</NextContinuationToken>" if last else ""
        return (
            f"<ListBucketResult><Name>{self.bucket}</Name><IsTruncated>{bool(last)}</IsTruncated>"
            f"{more}{''.join(rows.values())}</ListBucketResult>"
        )

    def answer(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Answer:
        """Carry out one request."""
        if headers.get("authorization") != f"Bearer {TOKEN}":
            raise _RefusedError(401, "AuthenticationRequired")
        if not key and method == "GET":
            return 200, {"Content-Type": "application/xml"}, self.page(query).encode()
        if "uploads" in query or "uploadId" in query:
            return self._upload_in_parts(method, key, query, headers, body)
        if method in ("GET", "HEAD"):
            return self._read(key, headers)
        if method == "DELETE":
            self.get(key)
            del self.objects[key]
            return 204, {}, b""
        if method == "PUT" and "x-goog-copy-source" in headers:
            bucket, _, source = unquote(headers["x-goog-copy-source"]).lstrip("/").partition("/")
            self.check_bucket(bucket)
            copied = self.get(source)
            made = self.create(key, copied.data, {**copied.metadata, **headers})
            return _xml("CopyObjectResult", ETag=made.etag)
        if method == "PUT" and key:
            return 200, _headers(self.create(key, body, headers)), b""
        raise _RefusedError(405, "MethodNotAllowed")

    def _upload_in_parts(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> Answer:
        if method == "POST" and "uploads" in query:
            upload_id = f"upload-{next(self.numbers)}"
            kept = {k: v for k, v in headers.items() if k.startswith("x-goog-meta-")}
            self.uploads[upload_id] = _Upload(key, kept)
            return _xml("InitiateMultipartUploadResult", UploadId=upload_id)
        upload_id = query.get("uploadId", "")
        upload = self._upload(upload_id)
        if upload.key != key:
            raise _RefusedError(404, "NoSuchUpload")
        if method == "PUT":
            upload.parts[int(query["partNumber"])] = body
            return 200, {"ETag": _etag(body)}, b""
        if method == "POST":
            made = self.complete(upload_id, body, headers)
            return _xml("CompleteMultipartUploadResult", ETag=made.etag, Key=key)
        if method == "DELETE":
            del self.uploads[upload_id]
            return 204, {}, b""
        raise _RefusedError(405, "MethodNotAllowed")

    def _read(self, key: str, headers: dict[str, str]) -> Answer:
        found = self.get(key)
        wanted = headers.get("range", "")
        if not wanted:
            return 200, _headers(found), found.data
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        size = len(found.data)
        start = int(first) if first else size - int(last)
        stop = min(int(last) + 1 if first and last else size, size)
        if start >= size:
            raise _RefusedError(416, "InvalidRange")
        shown = {**_headers(found), "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        return 206, shown, found.data[start:stop]


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _headers(found: _Object) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": format_datetime(found.modified, usegmt=True),
        "x-goog-generation": str(found.generation),
        **found.metadata,
    }


def _row(key: str, found: _Object) -> str:
    when = found.modified.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
        f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.data)}</Size></Contents>"
    )


def _prefix_row(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


def _xml(kind: str, **fields: str) -> Answer:
    rows = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    return 200, {"Content-Type": "application/xml"}, f"<{kind}>{rows}</{kind}>".encode()


@contextmanager
def running_gcs(bucket: str) -> Iterator[tuple[FakeGcs, str]]:
    """Serve a bucket until the block ends; yield it and where it is."""
    service = FakeGcs(bucket)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            where = urlsplit(self.path)
            name, _, key = where.path.lstrip("/").partition("/")
            asked = parse_qs(where.query, keep_blank_values=True)
            query = {k: v[0] for k, v in asked.items()}
            headers = {k.lower(): v for k, v in self.headers.items()}
            try:
                with service.lock:
                    service.check_bucket(name)
                    status, shown, data = service.answer(
                        self.command, unquote(key), query, headers, body
                    )
            except _RefusedError as refused:
                status, shown = refused.status, {"Content-Type": "application/xml"}
                data = f"<Error><Code>{refused.code}</Code></Error>".encode()
            with suppress(ConnectionError):  # whoever asked may have lost interest
                self._send(status, shown, data)

        def _send(self, status: int, shown: dict[str, str], data: bytes) -> None:
            self.send_response(status)
            for header, value in shown.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 - of the base

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield service, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
