"""A key of the user's own on this machine: with it a digest of private records may be published, and says nothing."""

import hashlib
import hmac
import os
import re
import secrets
from typing import Final

from fl_sim.store.files import folder_of

_KEY: Final = "key"
_FLEETING: Final = secrets.token_bytes(32)
_KEYED = re.compile("keyed-([0-9a-f]{16})-([0-9a-f]{32})-[0-9a-f]{64}")


def keyed(digest: str) -> str:
    """Return ``digest`` under the key, with a salt of its own: nobody without the key can try records against it.

    Nor tell whether two of them are of the same records. Empty where the key can be neither read nor made.
    """
    key = machine_key()
    return _under(key, secrets.token_hex(16), digest) if key else ""


def is_of(recorded: str, digest: str) -> bool | None:
    """Say whether ``keyed`` made ``recorded`` of ``digest``; None where that was under the key of another machine."""
    found, key = _KEYED.fullmatch(recorded), machine_key()
    if found is None or found[1] != _name(key):
        return None
    return hmac.compare_digest(_under(key, found[2], digest), recorded)


def _under(key: bytes, salt: str, digest: str) -> str:
    return f"keyed-{_name(key)}-{salt}-{hmac.new(key, f'{salt} {digest}'.encode(), hashlib.sha256).hexdigest()}"


def _name(key: bytes) -> str:
    return hashlib.sha256(b"the name of " + key).hexdigest()[:16]


def machine_key(*, make: bool = True) -> bytes:
    """Return the key, made where there is none; empty where it can be neither read nor made.

    ``make`` False writes nothing: where there is no key, one of this process's own takes its place.
    """
    path = folder_of("FL_SIM_LEDGERS", "XDG_STATE_HOME", "~/.local/state", "ledgers") / _KEY
    try:
        if not path.exists():
            if not make:
                return _FLEETING
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f"{_KEY}.{secrets.token_hex(8)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(new, path)  # whole, and never in the place of another process's
            except FileExistsError:
                pass
            finally:
                new.unlink()
        return path.read_bytes()
    except OSError:
        return b""
