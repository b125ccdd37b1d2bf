"""``python -m paged_backend.cli``, for machines where nothing is installed."""

import sys

from paged_backend.cli import main

sys.exit(main())
