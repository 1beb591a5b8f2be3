"""The `codec` of a tier: a name, or a list of names, each with options of its own where the codec has some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from lmkv.config.faults import explain
from lmkv.errors import LmkvError
from lmkv.frame import MAX_CODEC_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmkv.config.faults import Path
    from lmkv.plugins import PluginHost
    from lmkv.specs import CodecSpec

IDENTITY: Final = "identity"


class CodecStep(NamedTuple):
    """One codec of a chain."""

    name: str
    options: BaseModel | None
    """None: the codec has none."""
    path: tuple[str | int, ...]
    """Where its options stand, below the tier's `codec` key."""


@dataclass(frozen=True)
class CodecChain:
    """What a tier does with frames on their way down, in order; on their way up it is undone from the last."""

    steps: tuple[CodecStep, ...] = (CodecStep(IDENTITY, None, ()),)

    @property
    def name(self) -> str:
        """As it stands in the trailers of frames."""
        return "+".join(step.name for step in self.steps)

    def __str__(self) -> str:
        """As a file would say it, without options."""
        names = [step.name for step in self.steps]
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def as_chain(value: object) -> object:
    """For the model: a chain that was read with its options, or one name of a codec that needs none."""
    if isinstance(value, CodecChain):
        return value
    if isinstance(value, str):
        return CodecChain((CodecStep(value, None, ()),))
    raise ValueError("is checked with the codecs' own models: use load_config")


def read_chain(
    raw: object, host: PluginHost, context: dict[str, object], fault: Callable[[Path, str], None]
) -> CodecChain | None:
    """The chain that `raw` (plain data of a file) describes; None after telling `fault` what is wrong with it.

    Paths are relative to the tier's `codec` key.
    """
    faults: list[tuple[Path, str]] = []
    found: list[tuple[CodecSpec, Path]] = []
    steps = []
    for name, options, here, below in _items(raw, faults):
        try:
            spec = host.codec(name)
            model = host.codec_options(name)
        except LmkvError as error:
            faults.append((here, str(error)))
            continue
        found.append((spec, here))
        if model is not None:
            steps.append(CodecStep(name, _validated(model, options, below, context, faults), below))
        elif options in (None, {}):
            steps.append(CodecStep(name, None, below))
        else:
            faults.append((below, f"codec {name!r} has no options"))
    if not faults:
        faults += _nonsense(found)
    for path, message in faults:
        fault(path, message)
    return None if faults else CodecChain(tuple(steps))


def _items(raw: object, faults: list[tuple[Path, str]]) -> Iterator[tuple[str, object, Path, Path]]:
    """(name, options, place of the name, place of the options) of each codec."""
    listed = isinstance(raw, list)
    for number, item in enumerate(raw if isinstance(raw, list) else [raw]):
        here: Path = (number,) if listed else ()
        if isinstance(item, str):
            yield item, None, here, (*here, item)
        elif isinstance(item, dict) and len(item) == 1:
            ((name, options),) = item.items()
            yield str(name), options, (*here, str(name)), (*here, str(name))
        elif isinstance(item, dict):
            faults.append((here, "needs a list where there are several codecs, such as [zstd, aes-gcm]: order matters"))
        else:
            faults.append((here, "needs the name of a codec, {name: options}, or a list of these"))
    if listed and not raw:
        faults.append(((), f"is an empty list: leave it out, or write {IDENTITY}"))


def _validated(
    model: type[BaseModel], raw: object, path: Path, context: dict[str, object], faults: list[tuple[Path, str]]
) -> BaseModel | None:
    try:
        return model.model_validate({} if raw is None else raw, context=context)
    except ValidationError as error:
        faults += [
            ((*path, *detail["loc"]), explain(detail, model, show_input=False))
            for detail in error.errors(include_url=False)
        ]
    except Exception as error:  # noqa: BLE001  a stranger's validator may raise anything
        faults.append((path, f"{type(error).__name__} in the codec's check: {error}"))
    return None


def _nonsense(found: Sequence[tuple[CodecSpec, Path]]) -> Iterator[tuple[Path, str]]:
    """Orders in which a chain makes no sense."""
    seen: set[str] = set()
    sealed = lossy = ""
    for number, (spec, path) in enumerate(found):
        name = spec.name
        if name in seen:
            yield path, f"codec {name!r} stands in the list twice"
        elif len(found) > 1 and name == IDENTITY:
            yield path, f"{IDENTITY} does nothing: leave it out of the list"
        elif sealed:
            yield path, f"codec {name!r} gets what {sealed!r} has encrypted, which looks random: put {sealed!r} last"
        elif number and spec.reads_values:
            before = found[number - 1][0].name
            yield (
                path,
                f"codec {name!r} works on the KV values as they are: it has to stand first, not after {before!r}",
            )
        elif lossy and not spec.lossless:
            yield path, f"codec {name!r} is lossy, and so is {lossy!r}: choose one of them"
        seen.add(name)
        sealed = sealed or (name if spec.seals else "")
        lossy = lossy or ("" if spec.lossless else name)
    if len("+".join(spec.name for spec, _ in found)) > MAX_CODEC_NAME:
        yield (), f"the names are longer than {MAX_CODEC_NAME} characters together"


def options_schema(model: type[BaseModel], ref: dict[str, Any]) -> dict[str, Any]:
    """Schema of what may stand after a codec's name: its options, or nothing where none is required."""
    required = any(info.is_required() for info in model.model_fields.values())
    return ref if required else {"anyOf": [ref, {"type": "null"}]}
