"""`python -m fog_cli`, the same as `fog`."""

from __future__ import annotations

import sys

from fog_cli import main

sys.exit(main())
