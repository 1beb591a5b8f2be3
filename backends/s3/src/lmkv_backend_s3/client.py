"""boto3's client: keys, endpoint, signing. What it sends goes over our `Transport`."""

from __future__ import annotations

import base64
import hashlib
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import boto3
import botocore.session
from botocore.config import Config
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    CredentialResolver,
    DeferredRefreshableCredentials,
)
from botocore.exceptions import BotoCoreError, NoCredentialsError
from botocore.httpsession import get_cert_path

from lmkv.errors import ConfigError
from lmkv_backend_s3.line import CONNECT_SECONDS
from lmkv_backend_s3.transport import Transport

if TYPE_CHECKING:
    from lmkv_backend_s3.options import S3Options

_TALKATIVE: Final = ("boto3", "botocore", "s3transfer", "urllib3")


def make_client(options: S3Options, deadline: float) -> tuple[Any, Transport]:
    """A client for S3 and the transport that its requests go over. Asks no store; may ask for an instance's role.

    Raises:
        ConfigError: no such profile, an unreadable CA file, a name that boto3 does not take.
    """
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)  # at DEBUG they write every header, session tokens among them
    try:
        session = boto3.Session(
            profile_name=options.profile,
            region_name=options.region or ("us-east-1" if options.endpoint else None),
            aws_access_key_id=options.access_key,
            aws_secret_access_key=_open(options.secret_key),
            aws_session_token=_open(options.session_token),
        )
        if options.role_arn is not None:
            session = _in_role(session, options, deadline)
        transport = Transport(_trust(options, session))
        client = session.client("s3", endpoint_url=options.endpoint, config=_config(options))
    except (BotoCoreError, ValueError) as e:
        raise ConfigError(f"{e}") from None
    client.meta.events.register("before-send.s3", transport.send)
    if not options.express:
        client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    return client, transport


def _config(options: S3Options) -> Config:
    signed = not options.tls if options.sign_payload == "auto" else options.sign_payload == "always"
    when = "when_supported" if options.checksums else "when_required"
    return Config(
        s3={"addressing_style": options.addressing, "payload_signing_enabled": signed},
        request_checksum_calculation=when,
        response_checksum_validation="when_required",  # frames carry a checksum of their own
        retries={"total_max_attempts": 1, "mode": "standard"},  # ours know how much time is left
        parameter_validation=False,
        user_agent_extra="lmkv-backend-s3",
    )


def _trust(options: S3Options, session: boto3.Session) -> ssl.SSLContext:
    """How servers are verified. Without a file of the operator's: by what the system and what boto3 trust."""
    if not options.verify:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    bundle = options.ca_bundle.expanduser() if options.ca_bundle else None
    bundle = bundle or session._session.get_config_variable("ca_bundle")  # noqa: SLF001  boto3 gives no other access
    try:
        context = ssl.create_default_context(cafile=bundle and str(bundle))
        if bundle is None:
            context.load_verify_locations(get_cert_path(verify=True))
    except OSError as e:
        raise ConfigError(f"ca_bundle: cannot read {bundle}: {e.strerror or e}") from None
    return context


class _Role(CredentialProvider):  # type: ignore[misc]  # botocore has no types
    """A credential provider that boto3 asks as it asks its own."""

    METHOD = "lmkv-assume-role"

    def __init__(self, fetch: Any) -> None:
        super().__init__()
        self._fetch = fetch

    def load(self) -> DeferredRefreshableCredentials:
        """Keys that are fetched when they are needed first, and again before they expire."""
        return DeferredRefreshableCredentials(self._fetch, self.METHOD)


def _in_role(session: boto3.Session, options: S3Options, deadline: float) -> boto3.Session:
    """A session whose keys come from STS, asked for with those of `session`."""
    keys = session.get_credentials()
    if keys is None:
        raise NoCredentialsError
    limits = Config(connect_timeout=CONNECT_SECONDS, read_timeout=deadline, retries={"total_max_attempts": 1})
    verify = str(options.ca_bundle.expanduser()) if options.ca_bundle else options.verify
    arguments = {"RoleSessionName": "lmkv"}
    if options.external_id is not None:
        arguments["ExternalId"] = options.external_id.get_secret_value()
    fetcher = AssumeRoleCredentialFetcher(
        partial(session.client, config=limits, verify=verify), keys, options.role_arn, arguments
    )
    inner = botocore.session.get_session()
    if options.profile is not None:
        inner.set_config_variable("profile", options.profile)
    inner.register_component("credential_provider", CredentialResolver([_Role(fetcher.fetch_credentials)]))
    return boto3.Session(botocore_session=inner, region_name=session.region_name)


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """Older MinIOs, and what is built on them, take no DeleteObjects without it; boto3 sends a CRC-32 alone."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _open(secret: Any) -> str | None:
    return None if secret is None else secret.get_secret_value()
