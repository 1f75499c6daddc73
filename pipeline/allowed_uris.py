"""The URIs and file names that a run may use. Every URI comes from outside: from a configuration, a registry's pointer, a
manifest; every file name in a folder comes from its writer. None of them may lead out of what the deployment allows.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.errors import BadConfig, BadData, TrnpipeError

S3 = "s3://"
FILE = "file://"


def is_s3(uri: str) -> bool:
    return uri.startswith(S3)


def is_inside(name: object) -> bool:
    """Return whether a file name from a manifest or an object's key stays in the folder that it is relative to."""
    return isinstance(name, str) and not _strange(name) and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


def check_name(name: str) -> str:
    """Return a file's name relative to its folder, unchanged.

    Raises:
        BadData: it is absolute or would leave the folder.
    """
    if not is_inside(name):
        raise BadData(
            "a file's name leads out of its folder",
            value=repr(name),
            rule="a name is relative, and none of its parts is empty, `.` or `..`",
            remedy="no stage writes such a name: find out who wrote the folder",
        )
    return name


def objection(uri: str) -> str | None:
    """Return what is wrong with a URI's form, None if nothing is. It may still name something that does not exist."""
    if not uri or _strange(uri):
        return "is empty or has control characters in it"
    if is_s3(uri):
        bucket, *parts = uri.removeprefix(S3).split("/")
        if not bucket:
            return "names no bucket"
        if any(part in (".", "..") for part in parts) or "" in parts[:-1]:
            return "has a part that is empty, `.` or `..`"
        return None
    return "is neither s3://BUCKET/KEY nor a local path" if "://" in uri.removeprefix(FILE) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedUris:
    """The URIs that a run may read.

    Attributes:
        own: the folder that holds `runs/` and `registry/`: the deployment's bucket, or a local folder.
        read: further s3:// folders and files.
        local_paths: whether any local path is allowed.
    """

    own: str
    read: tuple[str, ...] = ()
    local_paths: bool = False

    def check(self, uris: Iterable[tuple[str, str]], error: type[TrnpipeError] = BadConfig) -> None:
        """Refuse URIs that lead elsewhere.

        Args:
            uris: pairs of the URI's source and the URI.
            error: BadConfig, or BadData for URIs from a file.

        Raises:
            BadConfig, BadData: names all of them, each with its reason.
        """
        if refused := [f"{name}: {uri!r} {reason}" for name, uri in uris if (reason := self.refusal(uri))]:
            raise error(
                "a URI that this deployment may not read",
                value=refused,
                rule=f"below {', '.join([self.own, *self.read])}" + (", or any local path" if self.local_paths else ""),
                remedy="put the data there, or add its folder to `read` in the deployment's settings and deploy",
            )

    def refusal(self, uri: str) -> str | None:
        """Return why a run may not read a URI, None if it may."""
        if wrong := objection(uri):
            return wrong
        if is_s3(uri):
            return None if any(_is_below(uri, folder) for folder in (self.own, *self.read)) else "is outside of these folders"
        # Links are followed: what counts is where a path leads.
        path, own = (os.path.realpath(name.removeprefix(FILE)) for name in (uri, self.own))
        allowed = self.local_paths or (not is_s3(self.own) and _is_below(path, own))
        return None if allowed else "is a local path, which only local runs may name"


def _strange(text: str) -> bool:
    return any(ord(character) < 32 or ord(character) == 127 for character in text)


def _is_below(uri: str, folder: str) -> bool:
    return uri.rstrip("/") == folder.rstrip("/") or uri.startswith(folder.rstrip("/") + "/")
