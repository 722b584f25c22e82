"""`fog completion`: prints the script with which a shell completes the arguments of `fog`."""

from __future__ import annotations

import argparse
from typing import Any

from fog_cli import UsageError

_EXAMPLES = """\
examples:
  eval "$(fog completion bash)"        in ~/.bashrc
  eval "$(fog completion zsh)"         in ~/.zshrc, after compinit
  fog completion fish | source         in ~/.config/fish/config.fish

It needs the package argcomplete: pip install argcomplete, or the extra `completion` of fogdist.
"""


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes words in a shell",
        description="Prints a script for a shell. With it, Tab completes the commands and options of fog.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    try:
        from argcomplete import shell_integration
    except ImportError:
        raise UsageError("completions need the package argcomplete: pip install argcomplete") from None
    print(shell_integration.shellcode(["fog"], shell=arguments.shell))
    return 0
