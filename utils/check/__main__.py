"""`python -m utils.check FILE [NAME …]`: checks the answers in a Python file."""

import sys

from utils.check.engine import main

sys.exit(main())
