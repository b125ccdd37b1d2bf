"""``python -m paged_backend.cli``, for machines where the package is not installed."""

import sys

from paged_backend.cli import main

sys.exit(main())
