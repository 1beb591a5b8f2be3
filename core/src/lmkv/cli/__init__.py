"""The command `lmkv`: plugins, check, schema, serve, controller, and the verbs that plugins add.

Exit codes: 0 all is well; 1 something that was asked about is not (a tier that does not answer); 2 the user must change
something (configuration, arguments). A user's mistake is one message, never a traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

OK: Final = 0
MISTAKE: Final = 2
_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and leave the process with its exit code."""
    code = run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has gone: nothing to complain about
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        # A client library's own threads may hang in a dead store, and the interpreter would wait for them for ever.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Raises SystemExit only for `--help`, `--version` and bad arguments."""
    from lmkv.errors import LmkvError  # noqa: PLC0415  as all imports here: `--help` stays quick

    given = sys.argv[1:] if arguments is None else list(arguments)
    parser, verbs = _parser()
    name = next((word for word in given if not word.startswith("-")), "")
    try:
        if name not in verbs.choices and "--version" not in given:
            from lmkv.cli import commands  # noqa: PLC0415

            commands.add(verbs, name)
        options = parser.parse_args(given)
        return int(options.verb(options))
    except LmkvError as error:
        print(f"lmkv {name}: {error}", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:
        return OK
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """The parser with lmkv's own verbs, and where others are added."""
    parser = argparse.ArgumentParser(prog="lmkv", description="A KV-cache layer for LLM inference.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", dest="name", required=True)

    plugins = verbs.add_parser(
        "plugins", help="list what plugins offer, backends and others, and what is wrong with them"
    )
    plugins.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    plugins.set_defaults(verb=_plugins)

    check = verbs.add_parser("check", help="check a configuration, then start each tier and move one frame through it")
    check.add_argument("file", nargs="?", help="YAML file (default: the one LMKV_CONFIG names, or none)")
    check.add_argument("--show", action="store_true", help="print effective values and their sources; starts nothing")
    check.add_argument("--offline", action="store_true", help="check the configuration only; starts nothing")
    check.set_defaults(verb=_check)

    schema = verbs.add_parser("schema", help="print the JSON Schema of the configuration, for editors")
    schema.set_defaults(verb=_schema)

    serve = verbs.add_parser("serve", help="run the node service until SIGTERM or SIGINT")
    serve.add_argument("--config", metavar="FILE", help="YAML file (default: the one LMKV_CONFIG names, or none)")
    serve.add_argument("--socket", metavar="PATH", help="path of the unix socket (default: service.socket)")
    serve.set_defaults(verb=_serve)

    controller = verbs.add_parser("controller", help="run the fleet's controller until SIGTERM or SIGINT")
    _controller_arguments(controller)
    controller.set_defaults(verb=_controller)
    return parser, verbs


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import version  # noqa: PLC0415  reads files

        print(f"lmkv {version('lmkv')}")
        parser.exit()


def _plugins(options: argparse.Namespace) -> int:
    from lmkv.cli import plugins  # noqa: PLC0415

    return plugins.run(as_json=options.json)


def _check(options: argparse.Namespace) -> int:
    from lmkv.cli import check  # noqa: PLC0415

    return check.run(options.file, show=options.show, offline=options.offline)


def _schema(_: argparse.Namespace) -> int:
    from lmkv.cli import schema  # noqa: PLC0415

    return schema.run()


def _serve(options: argparse.Namespace) -> int:
    from lmkv.cli import serve  # noqa: PLC0415

    return serve.run(options.config, options.socket)


def _controller_arguments(parser: argparse.ArgumentParser) -> None:
    from lmkv.cli import controller  # noqa: PLC0415

    controller.add_arguments(parser)


def _controller(options: argparse.Namespace) -> int:
    from lmkv.cli import controller  # noqa: PLC0415

    return controller.run(options)
