"""Source, environment and caller → a checked `Config`, or one error with everything that is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr, ValidationError

from lmkv.config.checks import cross_check
from lmkv.config.codecs import read_chain
from lmkv.config.environ import apply_environ, put
from lmkv.config.faults import Fault, at, explain, printed
from lmkv.config.limits import compute, refusal
from lmkv.config.model import Config, NoOptions
from lmkv.config.source import Document, parse_yaml
from lmkv.errors import ConfigError, LmkvError
from lmkv.units import Share

if TYPE_CHECKING:
    from pydantic import BaseModel

    from lmkv.config.faults import Path
    from lmkv.config.limits import Machine
    from lmkv.plugins import PluginHost

Source = str | os.PathLike[str] | Mapping[str, Any] | None


def load_config(
    source: Source = None,
    *,
    host: PluginHost,
    environ: Mapping[str, str] | None = None,
    name: str | None = None,
    overrides: Mapping[str, object] | None = None,
    machine: Machine | None = None,
) -> Config:
    """Read and check a configuration.

    Args:
        source: path of a YAML file; or its text (anything with a line break, or that begins with ``{``); or a mapping;
            or None: the file that ``LMKV_CONFIG`` names, and if it names none, the defaults.
        host: the installed plugins, against which names and options are checked.
        environ: the environment, ``os.environ`` when None. Its settings win over the source.
        name: what messages call the source, if it is not a file.
        overrides: settings of the caller by dotted path, such as ``{"ranks": 4}``; they win over all others.
        machine: also check that the limits fit it. Only for who is going to own the pool: for everybody else the
            pool that exists already would look like memory that is missing.

    Raises:
        ConfigError: with all faults, each with file and line or name of the variable, path, and nearest valid name.
    """
    environ = os.environ if environ is None else environ
    document = _read(source, environ, name)
    if document.faults and not document.data:
        raise refusal(document.name, document.faults)
    if document.data.get("tiers") is None and ("tiers",) not in document.places:
        document.data["tiers"] = [{"name": "ram", "backend": "cpu", "capacity": "100%"}]
    apply_environ(document, Config, host, environ)
    for dotted, value in (overrides or {}).items():
        put(document, tuple(dotted.split(".")), value, "set by the caller")
    return _Check(document, host, machine).config()


def _read(source: Source, environ: Mapping[str, str], name: str | None) -> Document:
    if source is None:
        source = environ.get("LMKV_CONFIG") or None
        if source is None:
            return Document(name or "")
        return _read_file(source)
    if isinstance(source, Mapping):
        document = Document(name or "configuration", _tree(source))
        for key, value in document.data.items():
            document.mark((key,), value, document.name)
        return document
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return parse_yaml(source, name or "configuration")
    return _read_file(source)


def _read_file(path: str | os.PathLike[str]) -> Document:
    shown = os.fspath(path)
    try:
        return parse_yaml(FilePath(path).read_text(encoding="utf-8-sig"), shown)
    except OSError as error:
        message = f"cannot be read: {error.strerror} (errno {error.errno})"
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
    except ValueError as error:  # a NUL in the path
        message = f"cannot be read: {error}"
    fault = Fault(shown, "", message)
    raise ConfigError(str(fault), faults=(str(fault),))


def _tree(value: object) -> Any:
    """Mappings as dicts, sequences as lists, all else as it is; nothing is shared with `value`."""
    if isinstance(value, Mapping):
        return {key: _tree(inner) for key, inner in value.items()}
    return [_tree(inner) for inner in value] if isinstance(value, (list, tuple)) else value


class _Check:
    """One check of one document. Faulty settings are taken out of a copy, so that the others are still checked."""

    def __init__(self, document: Document, host: PluginHost, machine: Machine | None) -> None:
        self.document = document
        self.host = host
        self.machine = machine
        self.faults = list(document.faults)
        self.unread = {fault.path for fault in document.faults if fault.path}
        self.dropped: set[Path] = set()
        self.data = _tree(document.data)

    def config(self) -> Config:
        self._options()
        config = self._model()
        if config is not None:
            config._host = self.host  # noqa: SLF001  one package
            config._places = self.document.places  # noqa: SLF001
            config._origin = self.document.name  # noqa: SLF001
            unknown = frozenset(self.dropped)
            for path, message in cross_check(config, self.host, unknown):
                self._fault(path, message)
            if self.machine is not None:
                self.faults += compute(config, self.machine, unknown)[1]
        if self.faults:
            raise refusal(self.document.name, self.faults)
        assert config is not None
        # Default tiers stay out, so that whoever reads the text knows that nobody chose them.
        chosen = any(path[0] == "tiers" for path in self.document.places)
        data = {key: value for key, value in self.document.data.items() if chosen or key != "tiers"}
        config._text = json.dumps(data, default=_plain)  # noqa: SLF001
        return config

    def _model(self) -> Config | None:
        """Validate; what is faulty is reported, taken out, and the rest validated again."""
        for _ in range(5):
            try:
                return Config.model_validate(self.data)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    path = detail["loc"]
                    if path not in self.dropped:
                        self._fault(path, explain(detail, Config, show_input=True))
                    self._drop(path)
        return None

    def _options(self) -> None:
        """Check each tier's options with its backend's own model, and put the instance in their place."""
        tiers = self.data.get("tiers")
        ranks = self.data.get("ranks", 1)
        for number, tier in enumerate(tiers if isinstance(tiers, list) else ()):
            if not isinstance(tier, dict) or not isinstance(tier.get("backend"), str):
                continue
            path: Path = ("tiers", number, "options")
            raw = tier.pop("options", None)
            try:
                model = self.host.options_model(tier["backend"])
            except LmkvError as error:
                self._fault(("tiers", number, "backend"), str(error))
                self.dropped.add(("tiers", number, "backend"))
                tier["options"] = NoOptions()
                continue
            context: dict[str, object] = {"ranks": _whole(ranks), "tier": tier.get("name", tier["backend"])}
            self._codec(tier, ("tiers", number, "codec"), context)
            tier["options"] = self._validated(model, {} if raw is None else raw, path, context)

    def _codec(self, tier: dict[str, Any], path: Path, context: dict[str, object]) -> None:
        """Check a tier's codecs with their own models, and put the chain in their place."""
        if "codec" not in tier:
            return
        chain = read_chain(
            tier.pop("codec"), self.host, context, lambda below, message: self._fault((*path, *below), message)
        )
        if chain is None:
            self.dropped.add(path)
        else:
            tier["codec"] = chain

    def _validated(self, model: type[BaseModel], raw: object, path: Path, context: dict[str, object]) -> BaseModel:
        try:
            return model.model_validate(raw, context=context)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                self._fault((*path, *detail["loc"]), explain(detail, model, show_input=False))
        except Exception as error:  # noqa: BLE001  a stranger's validator may raise anything
            self._fault(path, f"{type(error).__name__} in the backend's check: {error}")
        self.dropped.add(path)
        return NoOptions()

    def _drop(self, path: Path) -> None:
        """Take the setting at `path` out of the copy, or what stands where it should be."""
        self.dropped.add(path)
        here: Any = self.data
        for part in path[:-1]:
            here = here[part]
        last = path[-1] if path else None
        if isinstance(here, dict) and last == "backend":
            here["backend"] = "unknown"
        elif isinstance(here, dict):
            here.pop(last, None)
        elif isinstance(here, list) and isinstance(last, int):
            here[last] = {"name": f"tier-{last}", "backend": "unknown"}
            self.dropped.add((*path, "backend"))

    def _fault(self, path: Path, message: str) -> None:
        if printed(path) in self.unread:  # the text itself is at fault, what stands in for it is not
            return
        where = at(self.document.places, path, self.document.name)
        self.faults.append(Fault(where, printed(path), message))


def _whole(value: object) -> int:
    try:
        return max(1, int(value))  # type: ignore[call-overload, no-any-return]  # whatever it is, it is tried
    except (TypeError, ValueError):
        return 1


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, (Share, os.PathLike)):
        return str(value)
    raise ConfigError(f"a {type(value).__name__} cannot be written to a configuration file")
