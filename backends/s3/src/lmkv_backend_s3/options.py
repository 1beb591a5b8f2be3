"""The `options:` of a tier with `backend: s3`."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path  # noqa: TC003  pydantic needs it when the module is imported
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from lmkv.secrets import Secret  # noqa: TC001  pydantic needs it when the module is imported
from lmkv.units import Size, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from lmkv.specs import BackendContext

SMALLEST_PART: Final = 5 << 20
"""Of a multipart upload, but for its last part: a rule of S3."""
_SLOW_CLASSES: Final = {"GLACIER", "DEEP_ARCHIVE"}
_SSE_KEY_BYTES: Final = 32


class S3Options(BaseModel):
    """One bucket, or the part of it below a prefix."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    bucket: str = Field(
        pattern=r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9]|arn:aws[a-z-]*:s3[a-z-]*:[A-Za-z0-9:/._-]+)$",
        description="Name of the bucket, or ARN of an access point.",
    )
    prefix: str = Field(
        default="lmkv/",
        pattern=r"^([A-Za-z0-9_.=-]+/)*$",
        description="What the keys of all objects begin with; ends with a slash, or is empty.",
    )
    endpoint: str | None = Field(
        default=None, description="URL of a compatible store, such as `https://minio.example:9000`. Default: AWS."
    )
    region: str | None = Field(
        default=None,
        description="Region of the bucket. Default: that of boto3's configuration; with `endpoint`, `us-east-1`.",
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto",
        description="Whether the bucket stands in the path or in the host name. `auto`: boto3 decides.",
    )
    access_key: str | None = Field(
        default=None, description="Access key. Default: boto3's own chain (environment, files, roles)."
    )
    secret_key: Secret | None = Field(default=None, description="Secret of `access_key`.")
    session_token: Secret | None = Field(default=None, description="Token of temporary keys.")
    profile: str | None = Field(default=None, description="A profile of the AWS configuration files.")
    role_arn: str | None = Field(
        default=None,
        pattern=r"^arn:[A-Za-z0-9-]+:iam::\d{12}:role/.+$",
        description="A role to assume with the keys above, renewed before it expires.",
    )
    external_id: Secret | None = Field(default=None, description="External id that the role asks for.")
    verify: bool = Field(default=True, description="Check the server's certificate.")
    ca_bundle: Path | None = Field(
        default=None, description="File of the authorities to trust. Default: AWS_CA_BUNDLE, else those of boto3."
    )
    create: bool = Field(default=False, description="Create the bucket if it does not exist.")
    read_only: bool = Field(
        default=False,
        description="Take no frames, remove none, and do not check whether one could; with `write: never`.",
    )
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = Field(
        default=None, description="Encryption by the server. Default: what the bucket says."
    )
    kms_key_id: str | None = Field(default=None, description="Key for `sse: aws:kms`. Default: that of the account.")
    sse_customer_key: Secret | None = Field(
        default=None,
        description="32 bytes as base64: the server encrypts with this key and does not keep it. TLS only.",
    )
    storage_class: str | None = Field(
        default=None,
        pattern=r"^[A-Z0-9_]+$",
        description="Storage class of the frames. Those that must be thawed before a read are refused.",
    )
    sign_payload: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Sign a SHA-256 of each frame that is sent. `auto`: only where there is no TLS.",
    )
    checksums: bool = Field(
        default=False,
        description="Send checksums of S3's own besides the one in each frame; buckets with Object Lock want them.",
    )
    range_size: Size = Field(
        default=8 << 20,
        description="A frame is read in ranges of about this size, at once. Larger: fewer requests.",
    )
    multipart_size: Size = Field(
        default=64 << 20, description="Frames from this size on are written in parts, at once; smaller ones in one PUT."
    )
    part_size: Size = Field(default=16 << 20, description="Least size of such a part: 5MiB or more.")
    connections: Annotated[int, Field(ge=1, le=256)] = Field(
        default=16, description="Requests under way at once, of all calls together."
    )

    @field_validator("endpoint")
    @classmethod
    def _an_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            port = parts.port
        except ValueError:
            raise ValueError("is no URL: write https://host:port") from None
        if parts.username is not None or parts.password is not None or "@" in parts.netloc:
            raise ValueError("carries a user or password: give access_key and secret_key instead")
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
            raise ValueError("is no http or https URL: write https://host:port")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError("has a path: the bucket goes to `bucket`, what is below it to `prefix`")
        return value.rstrip("/")

    @field_validator("storage_class")
    @classmethod
    def _readable_at_once(cls, value: str | None) -> str | None:
        if value in _SLOW_CLASSES:
            raise ValueError(
                f"{value}: frames would have to be thawed for hours before a read; GLACIER_IR is the cold "
                "class that can be read at once"
            )
        return value

    @field_validator("sse_customer_key")
    @classmethod
    def _a_key(cls, value: SecretStr | None) -> SecretStr | None:
        try:
            if value is not None and len(base64.b64decode(value.get_secret_value(), validate=True)) == _SSE_KEY_BYTES:
                return value
        except (binascii.Error, ValueError):
            pass
        if value is not None:
            raise ValueError("is 32 bytes as base64; `openssl rand -base64 32` makes one")
        return value

    @field_validator("part_size")
    @classmethod
    def _large_enough(cls, value: int) -> int:
        if value < SMALLEST_PART:
            raise ValueError(f"{format_size(value)}: S3 takes no parts below 5MiB")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        faults = [*self._key_faults(), *self._encryption_faults()]
        if self.ca_bundle is not None and not self.verify:
            faults.append("ca_bundle needs verify: true")
        if self.read_only and self.create:
            faults.append("read_only and create contradict each other")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _key_faults(self) -> Iterator[str]:
        if (self.access_key is None) != (self.secret_key is None):
            yield "access_key and secret_key belong together: give both or none"
        if self.session_token is not None and self.access_key is None:
            yield "session_token needs access_key and secret_key"
        if self.profile is not None and self.access_key is not None:
            yield "profile and access_key are two sources of keys: give one"
        if self.external_id is not None and self.role_arn is None:
            yield "external_id needs role_arn"

    def _encryption_faults(self) -> Iterator[str]:
        if self.kms_key_id is not None and (self.sse is None or not self.sse.startswith("aws:kms")):
            yield "kms_key_id needs sse: aws:kms"
        if self.sse_customer_key is not None and self.sse is not None:
            yield "sse and sse_customer_key are two ways of encryption: give one"
        if self.sse_customer_key is not None and not self.tls:
            yield "sse_customer_key would be sent in the clear: give an https endpoint"

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.endpoint is None or self.endpoint.startswith("https:")

    @property
    def express(self) -> bool:
        """Whether it is a directory bucket of S3 Express, which differs: listings without order, no MD5."""
        return self.bucket.endswith("--x-s3")

    def check(self, context: BackendContext) -> list[str]:  # noqa: ARG002  what every backend's options are asked
        """What would stop the tier from starting, found without asking the store."""
        if self.ca_bundle is not None and not self.ca_bundle.expanduser().is_file():
            return [f"ca_bundle: {self.ca_bundle} is no file"]
        return []
