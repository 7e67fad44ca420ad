"""``python -m detlab`` is the ``detlab`` command."""

from detlab.cli import main

raise SystemExit(main())
