"""`python -m fogdist`, the same as `fog` where its script is not on the path; slower to start, as it imports torch."""

from __future__ import annotations

import sys

from fog_cli import main

sys.exit(main())
