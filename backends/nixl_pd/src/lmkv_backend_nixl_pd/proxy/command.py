"""The verb `lmkv proxy`: an option for each of the settings, then the server."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import SecretStr

from lmkv.errors import PluginError
from lmkv_backend_nixl_pd.proxy.settings import Settings, read_settings

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from pydantic.fields import FieldInfo


class ProxyCommand:
    """`lmkv proxy`."""

    def configure(self, parser: ArgumentParser) -> None:
        """An option for each of the settings."""
        parser.add_argument(
            "--config", metavar="FILE", help="YAML file of the options below, with _ for - in the names"
        )
        for name, field in Settings.model_fields.items():
            _add(parser, name, field)

    def run(self, options: Namespace) -> int:
        """Serve until SIGTERM or SIGINT."""
        given: dict[str, object] = {}
        for name, field in Settings.model_fields.items():
            value = getattr(options, name)
            if value is not None:
                given[name] = {"file": value} if _kind(field) is SecretStr else value
        settings = read_settings(given, options.config)
        try:
            from lmkv_backend_nixl_pd.proxy.serve import serve  # noqa: PLC0415  imports the server
        except ModuleNotFoundError as error:
            raise PluginError(f"the proxy needs {error.name}: pip install lmkv-backend-nixl-pd") from None
        return serve(settings)


def _kind(field: FieldInfo) -> Any:
    """The type of a field, without `None` and annotations."""
    kind = field.annotation
    kinds = [part for part in get_args(kind) if part is not NoneType] if NoneType in get_args(kind) else [kind]
    found = kinds[0]
    return get_args(found)[0] if hasattr(found, "__metadata__") else found


def _add(parser: ArgumentParser, name: str, field: FieldInfo) -> None:
    """The option of one setting. Secrets are read from files: a command line is for all to see."""
    kind, option = _kind(field), f"--{name.replace('_', '-')}"
    text = (field.description or "").replace("%", "%%")
    if kind is SecretStr:
        parser.add_argument(f"{option}-file", dest=name, metavar="FILE", help=f"File of: {text}")
    elif kind is bool:
        parser.add_argument(option, action="store_const", const=True, help=text)
    elif get_origin(kind) is Literal:
        parser.add_argument(option, choices=get_args(kind), help=f"{text} Default: {field.default}.")
    elif field.default == ():
        metavar = "URL" if name == "prefill" else "URL=NAME"
        parser.add_argument(option, nargs="+", action="extend", metavar=metavar, help=text)
    else:
        default = "" if field.default is None else f" Default: {field.default}."
        parser.add_argument(option, metavar="VALUE", help=text + default)
