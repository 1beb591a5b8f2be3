"""Finds plugins by the entry-point group ``lmkv`` and keeps what they offer, by kind and name.

pluggy's own loader silently skips the second of two plugins with one name and lets one broken plugin abort all. Here
every fault becomes a `Problem` that names the distributions and their versions; it stops a start only if the
configuration names what the plugin would have offered. Listing imports plugin modules, never a client library: specs
load lazily.
"""

from __future__ import annotations

import difflib
import importlib
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import pluggy
from pydantic import ValidationError

from lmkv import hookspecs
from lmkv.errors import ConfigError, PluginError
from lmkv.installed import Kind, Origin, Problem, entry_points, version
from lmkv.specs import API, BackendSpec, CodecSpec, CommandSpec, PolicySpec, TransportSpec

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Mapping, Sequence

    from pydantic import BaseModel

    from lmkv.peer.transport import TransportFactory
    from lmkv.specs import BackendFactory, Codec, Command, EvictionPolicy

CORE_MODULES: Final = ("lmkv.builtin", "lmkv.peer.plugin")
"""The core's own plugins: they enter by the same hooks as everybody's."""
CORE_COMMANDS: Final = ("plugins", "check", "schema", "serve", "controller")
"""Verbs of the command line that no plugin gets: they work whatever is installed."""

Spec = TypeVar("Spec", BackendSpec, CodecSpec, CommandSpec, PolicySpec, TransportSpec)
AnySpec = BackendSpec | CodecSpec | CommandSpec | PolicySpec | TransportSpec
Loaded = TypeVar("Loaded")
_HOOKS: Final[dict[str, tuple[Kind, type[AnySpec]]]] = {
    "lmkv_backends": ("backend", BackendSpec),
    "lmkv_codecs": ("codec", CodecSpec),
    "lmkv_commands": ("command", CommandSpec),
    "lmkv_policies": ("policy", PolicySpec),
    "lmkv_transports": ("transport", TransportSpec),
}
_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Registered(Generic[Spec]):
    """A spec that can be used, and who offers it."""

    spec: Spec
    distribution: str
    version: str
    module: str


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that `word` was probably meant to be, or None."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing when no word is near."""
    found = nearest(word, words)
    return f" (did you mean {found!r}?)" if found else ""


class PluginHost:
    """What all installed plugins offer, and what is wrong with them.

    Built once, read-only afterwards, so it may be shared between threads. Nothing is kept at module level.
    """

    def __init__(self) -> None:
        self.backends: dict[str, Registered[BackendSpec]] = {}
        self.codecs: dict[str, Registered[CodecSpec]] = {}
        self.commands: dict[str, Registered[CommandSpec]] = {}
        self.policies: dict[str, Registered[PolicySpec]] = {}
        self.transports: dict[str, Registered[TransportSpec]] = {}
        self.problems: list[Problem] = []
        self.origins: list[Origin] = []
        """Every entry point of the group, broken ones too."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._claims: dict[tuple[Kind, str], list[tuple[AnySpec, Origin]]] = {}

    @classmethod
    def discover(cls, extra: Sequence[object] = ()) -> PluginHost:
        """Load the core's own plugins, every installed one, and the `extra` plugin objects (for tests and embedders).

        Never raises for a broken plugin: see `problems`.
        """
        host = cls()
        core = version("lmkv")
        for module in CORE_MODULES:
            origin = Origin("lmkv", core, module.split(".")[1], module)
            host._add(origin, partial(importlib.import_module, module))
        for origin, load in entry_points(host.problems):
            host._add(origin, load)
        for number, plugin in enumerate(extra):
            name = getattr(plugin, "__name__", type(plugin).__name__)
            host._add(Origin(name, "", f"extra-{number}", name), partial(_same, plugin))
        host._settle()
        return host

    @property
    def tables(self) -> dict[Kind, dict[str, Registered[Any]]]:
        """What can be used, of every kind, by name."""
        return {
            "backend": self.backends,
            "codec": self.codecs,
            "policy": self.policies,
            "transport": self.transports,
            "command": self.commands,
        }

    def backend(self, name: str) -> BackendSpec:
        """The backend of that name; `PluginError` names the nearest ones, or the problem of the plugin that has it."""
        return self._find("backend", self.backends, name).spec

    def codec(self, name: str) -> CodecSpec:
        """The codec of that name; raises as `backend`."""
        return self._find("codec", self.codecs, name).spec

    def policy(self, name: str) -> PolicySpec:
        """The eviction policy of that name; raises as `backend`."""
        return self._find("policy", self.policies, name).spec

    def transport(self, name: str) -> TransportSpec:
        """The transport of that name; raises as `backend`."""
        return self._find("transport", self.transports, name).spec

    def options_model(self, name: str) -> type[BaseModel]:
        """The pydantic model of a backend's `options:`; `PluginError` with the traceback when it cannot be had."""
        found = self._find("backend", self.backends, name)
        return _guarded("backend", found, found.spec.options)

    def load_backend(self, name: str) -> BackendFactory:
        """Import the backend and return its factory; `PluginError` with the traceback when that fails."""
        found = self._find("backend", self.backends, name)
        return _guarded("backend", found, found.spec.load)

    def codec_options(self, name: str) -> type[BaseModel] | None:
        """The pydantic model of a codec's options, None when it has none; raises as `options_model`."""
        found = self._find("codec", self.codecs, name)
        return None if found.spec.options is None else _guarded("codec", found, found.spec.options)

    def load_codec(self, name: str, options: BaseModel | None = None) -> Codec:
        """Import the codec and make one; raises as `load_backend`.

        `options` None: its defaults; `ConfigError` where it has none.
        """
        found = self._find("codec", self.codecs, name)

        def make() -> Codec:
            factory = found.spec.load()
            if found.spec.options is None:
                return factory()
            return factory(_defaults(name, found.spec.options()) if options is None else options)

        return _guarded("codec", found, make)

    def load_policy(self, name: str) -> EvictionPolicy:
        """Import the policy and make one; raises as `load_backend`."""
        found = self._find("policy", self.policies, name)
        return _guarded("policy", found, lambda: found.spec.load()())  # noqa: PLW0108  as above

    def load_command(self, name: str, parser: ArgumentParser) -> Command:
        """Load the command of that name and let it add its arguments to `parser`; raises as `load_backend`."""
        found = self._find("command", self.commands, name)

        def make() -> Command:
            command = found.spec.load()
            command.configure(parser)
            return command

        return _guarded("command", found, make)

    def causes(self, kind: Kind, name: str) -> str:
        """What is wrong with the plugins that were to offer `name`; empty when nothing is known."""
        return "; ".join(str(problem) for problem in self.problems if _explains(problem, kind, name))

    def load_transport(self, name: str) -> TransportFactory:
        """Import the transport and return its factory; raises as `load_backend`."""
        found = self._find("transport", self.transports, name)
        return _guarded("transport", found, found.spec.load)

    def _add(self, origin: Origin, load: Callable[[], object]) -> None:
        """Import one plugin, check its hooks, call them, and note what it claims."""
        self.origins.append(origin)
        try:
            plugin = load()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a stranger's module may raise anything
            first = str(error).splitlines()[0] if str(error) else ""
            text = f"plugin {origin.entry_point!r} of {origin} cannot be imported: {type(error).__name__}: {first}"
            self._report("import", text, origin, error=error)
            return
        self._check_hooks(plugin, origin)
        if any(plugin is known for _, known in self._manager.list_name_plugin()):
            # Two entry points for one module: whatever it offers is claimed twice, which `_settle` reports.
            self._collect(plugin, origin)
            return
        try:
            self._manager.register(plugin, f"{origin.distribution}:{origin.entry_point}:{len(self.origins)}")
        except (pluggy.PluginValidationError, ValueError, TypeError) as error:
            self._report("hook", f"plugin {origin.entry_point!r} of {origin}: {error}", origin)
            return
        self._collect(plugin, origin)

    def _check_hooks(self, plugin: object, origin: Origin) -> None:
        """Report hook functions that no spec knows, and functions named like a hook that lack the marker."""
        for name in dir(plugin):
            options = self._manager.parse_hookimpl_opts(plugin, name)
            where = f"plugin {origin.entry_point!r} of {origin}"
            if options is not None and (options.get("specname") or name) not in _HOOKS:
                hint = did_you_mean(name, _HOOKS) or f"; hooks are {', '.join(_HOOKS)}"
                self._report("hook", f"{where}: there is no hook {name!r}{hint}", origin)
            elif options is None and name in _HOOKS and callable(getattr(plugin, name)):
                self._report("hook", f"{where}: {name!r} is not marked with @lmkv.hookspecs.hookimpl", origin)

    def _collect(self, plugin: object, origin: Origin) -> None:
        """Call the plugin's hooks one by one, so that whatever they do is its fault alone."""
        where = f"plugin {origin.entry_point!r} of {origin}"
        for hook, (kind, wanted) in _HOOKS.items():
            if self._manager.parse_hookimpl_opts(plugin, hook) is None:
                continue
            try:
                specs = getattr(plugin, hook)()
                specs = list(specs) if isinstance(specs, Iterable) else specs
            except (Exception, SystemExit) as error:  # noqa: BLE001  a stranger's hook may raise anything
                self._report("import", f"{where}: {hook} raised {type(error).__name__}: {error}", origin, error=error)
                continue
            if not isinstance(specs, list):
                text = f"{where}: {hook} returned {type(specs).__name__}, not a list of {wanted.__name__}"
                self._report("spec", text, origin)
                continue
            for spec in specs:
                self._claim(kind, wanted, spec, origin)

    def _claim(self, kind: Kind, wanted: type[AnySpec], spec: object, origin: Origin) -> None:
        where = f"plugin {origin.entry_point!r} of {origin}"
        if not isinstance(spec, wanted):
            self._report("spec", f"{where} offers a {type(spec).__name__} as {kind}, not a {wanted.__name__}", origin)
        elif not _NAME.fullmatch(str(spec.name)):
            text = f"{where}: {kind} name {spec.name!r} is not of lower-case letters, digits and single dashes"
            self._report("spec", text, origin)
        elif spec.api != API:
            remedy = "upgrade lmkv" if _newer(spec.api) else "upgrade the plugin"
            text = f"{where}: {kind} {spec.name!r} is written for plugin API {spec.api}, this lmkv has {API}: {remedy}"
            self._report("api", text, origin, offers=((kind, spec.name),))
        elif kind == "command" and spec.name in CORE_COMMANDS:
            text = f"{where}: command {spec.name!r} is one of lmkv's own: the plugin has to name it otherwise"
            self._report("conflict", text, origin, offers=((kind, spec.name),))
        else:
            self._claims.setdefault((kind, spec.name), []).append((spec, origin))

    def _settle(self) -> None:
        """Turn claims into registrations; a name that is claimed twice goes to nobody."""
        tables = self.tables
        for (kind, name), claims in sorted(self._claims.items()):
            if len(claims) > 1:
                origins = tuple(origin for _, origin in claims)
                who = " and ".join(f"{origin} ({origin.module})" for origin in origins)
                text = f"{kind} {name!r} is claimed by {who}: uninstall all but one"
                self.problems.append(Problem("conflict", text, origins, ((kind, name),)))
                continue
            spec, origin = claims[0]
            tables[kind][name] = Registered(spec, origin.distribution, origin.version, origin.module)

    def _report(
        self,
        kind: Literal["conflict", "import", "api", "hook", "spec"],
        message: str,
        origin: Origin,
        *,
        offers: tuple[tuple[Kind, str], ...] = (),
        error: BaseException | None = None,
    ) -> None:
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        self.problems.append(Problem(kind, message, (origin,), offers, text))

    def _find(self, kind: Kind, table: Mapping[str, Registered[Spec]], name: str) -> Registered[Spec]:
        found = table.get(name)
        if found is not None:
            return found
        if causes := self.causes(kind, name):
            raise PluginError(causes)
        hint = did_you_mean(name, table)
        if not hint:
            hint = f"; installed: {', '.join(sorted(table))}" if table else "; none is installed"
        broken = [problem for problem in self.problems if problem.kind != "conflict"]
        if broken:
            hint += f"; {len(broken)} installed plugin(s) have problems, see `lmkv plugins`"
        raise PluginError(f"no {kind} {name!r}{hint}")


def _explains(problem: Problem, kind: Kind, name: str) -> bool:
    """Whether `problem` is why there is no `name`: it says so, or its plugin is named like it."""
    if problem.offers:
        return (kind, name) in problem.offers
    parts = (re.split(r"[-_.]+", origin.distribution.lower()) for origin in problem.origins)
    named = any(origin.entry_point == name for origin in problem.origins)
    return named or any("-".join(part).endswith(f"-{kind}-{name}") for part in parts)


def _defaults(codec: str, model: type[BaseModel]) -> BaseModel:
    """The options of a codec of which nobody has said any."""
    try:
        return model()
    except ValidationError as error:
        missing = ", ".join(str(detail["loc"][0]) for detail in error.errors() if detail["loc"])
        raise ConfigError(f"codec {codec!r} needs options: {missing}", kind="codec") from None


def _guarded(kind: Kind, found: Registered[Any], load: Callable[[], Loaded]) -> Loaded:
    """Call a plugin's function; what it raises becomes a `PluginError` with its traceback."""
    try:
        return load()
    except (ConfigError, PluginError):
        raise
    except (Exception, SystemExit) as error:
        who = f"{found.distribution} {found.version}".strip()
        trace = "".join(traceback.format_exception(error)).rstrip()
        text = f"{kind} {found.spec.name!r} of {who} cannot be loaded: {type(error).__name__}: {error}\n{trace}"
        raise PluginError(text) from error


def _newer(api: object) -> bool:
    return isinstance(api, int) and api > API


def _same(plugin: object) -> object:
    return plugin
